"""The page's markup and style, as templates of jinja2: light or dark as the reader's system, local fonts."""

DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torch_uvm: {{ title }}</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
  --soft: light-dark(#5b6575, #9aa5b4); --rule: light-dark(#dfe3e8, #323a47); }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1000px; }
h1, h2 { margin: 30px 0 10px; } dd, figcaption, p { margin: 4px 0; }
.soft, figcaption, dt, small, thead, code.source { color: var(--soft); }
dl div, ul.advice li, figure, table { border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(176px, 1fr)); gap: 12px; }
dd { font-size: 20px; font-weight: 600; } small, dt, figcaption, table { font-size: 13px; }
dd small, ul.advice b, code.source { display: block; }
ul.advice { list-style: none; padding: 0; }
ul.advice li { border-left: 5px solid var(--soft); margin: 8px 0; }
ul.advice li.act { border-left-color: #b3541e; } ul.advice li.good { border-left-color: #2d6a4f; }
figure { margin: 0 0 14px; } svg { display: block; }
figcaption i { display: inline-block; width: 14px; margin: 0 5px 4px 12px; border-top: 3px solid; }
svg text { fill: var(--soft); font-size: 12px; }
polyline { fill: none; stroke: currentColor; stroke-width: 1.6; } line { stroke: currentColor; }
.resident, .managed, .to-device { color: #3a86b8; } .host, .back { color: #d8a24a; }
.in-place { color: #7c8f4e; } .grid { color: var(--rule); } .axis { color: var(--soft); }
.budget { color: #d62839; stroke-dasharray: 7 4; border-top-style: dashed !important; }
.step { color: var(--soft); stroke-dasharray: 2 4; border-top-style: dotted !important; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 6px 9px; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th[scope=row] { font-weight: 400; }
td.figure, th.figure { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{{ body }}
</main>
</body>
</html>
"""

RUN = """\
{# A formatted number, with its exact value for programs. #}
{% macro data(key, value, shown) %}<data id="{{ key }}" value="{{ value }}">{{ shown }}</data>{% endmacro %}
{% macro bytes(key, value) %}{{ data(key, value, value | size) }}{% endmacro %}
{% macro tile(name, value, below="") %}
<div><dt>{{ name }}</dt><dd>{{ value }}{% if below %}<small>{{ below }}</small>{% endif %}</dd></div>
{% endmacro %}
{% macro heads(first, others) %}
<thead><tr><th scope="col">{{ first }}</th>
{% for it in others %}<th scope="col" class="figure">{{ it }}</th>{% endfor %}</tr></thead>
{% endmacro %}
<p class="soft" id="ended">{{ facts.ended }}</p>
<dl>
{{ tile("run time", data("seconds", facts.seconds, facts.seconds | duration)) }}
{% for device, peak in facts.peaks | dictsort %}
{% set budget = facts.budgets[device] %}
{{ tile("peak on device %d" % device, bytes("peak-%d" % device, peak),
        "of " ~ bytes("budget-%d" % device, budget) if budget is defined else "no budget") }}
{% endfor %}
{{ tile("peak of managed memory", bytes("peak-managed", facts.most_reserved)) }}
{{ tile("peak on the host, pinned", bytes("peak-host", facts.most_host)) }}
{{ tile("host waited", data("waited-seconds", facts.waited, facts.waited | duration)) }}
{{ tile("optimizer steps", data("steps", facts.samples[-1].steps, facts.samples[-1].steps | count)) }}
</dl>
<h2>Advice</h2>
<ul class="advice">
{% for it in advice %}
<li class="{{ it.kind }}" id="advice-{{ it.key }}"><b>{{ it.title | prose }}</b> {{ it.text | prose }}</li>
{% endfor %}
</ul>
{{ pictures }}
{% if storages %}
<h2>Tensors by traffic</h2>
<p class="soft">Storages of at least 256 KiB, those of one size that one line made together. The line is the
innermost one outside PyTorch's files and ours.</p>
<table id="by-traffic">
{{ heads("made at", ["traffic", "fetched", "back", "in place", "size of one", "made", "at once"]) }}
<tbody>
{% for it in storages %}
<tr><td><code>{{ it | place }}</code>
{% if it.function and it.function != "<module>" %} in <code>{{ it.function }}</code>{% endif %}
{% if it.source %} <code class="source">{{ it.source[:110] }}</code>{% endif %}</td>
<td class="figure">{{ it.traffic | size }}</td>
{% for kind in ("fetched", "written_back", "used_in_place") %}
<td class="figure">{{ it.moved[kind].count | count }}</td>
{% endfor %}
<td class="figure">{{ it.bytes | size if it.bytes else "various" }}</td>
<td class="figure">{{ it.made | count }}</td><td class="figure">{{ it.most_bytes | size }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endif %}
<h2>All figures</h2>
<table id="figures">
{{ heads("figure", ["count", "bytes", "ms"]) }}
<tbody>
{% for key, words in transfers.items() %}
{% set count, ms = facts.total(key ~ ".count"), facts.total(key ~ ".ms") %}
<tr><th scope="row"><code>{{ key }}</code><br>{{ words }}</th>
<td class="figure">{{ data(key ~ ".count", count, count | count) }}</td>
<td class="figure">{{ bytes(key ~ ".bytes", facts.total(key ~ ".bytes")) }}</td>
<td class="figure">{{ data(key ~ ".ms", ms, "%.1f" % ms) }}</td></tr>
{% endfor %}
{% for key, words in counts.items() %}
<tr><th scope="row"><code>{{ key }}</code><br>{{ words }}</th>
<td class="figure">{{ data(key, facts.total(key), facts.total(key) | count) }}</td><td></td><td></td></tr>
{% endfor %}
</tbody>
</table>
<h2>Settings</h2>
<table id="settings">
<tbody>
{% for name, value in facts.settings.items() %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</tbody>
</table>
"""
