"""The page's style: light or dark as the reader's system, local fonts, nothing to download."""

CSS = """
:root { color-scheme: light dark; --paper: #fbfbf9; --card: #ffffff; --ink: #1c2330; --soft: #5b6575;
  --rule: #dfe3e8; --resident: #2a6f97; --host: #d8a24a; --managed: #7f9fb8; --budget: #c1121f;
  --back: #bc6c25; --in-place: #606c38; --waited: #7b2cbf; --good: #2d6a4f; --act: #b3541e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --card: #1c222c; --ink: #e6e9ee; --soft: #9aa5b4; --rule: #323a47;
  --resident: #5fa8d3; --host: #e9c46a; --managed: #8fb3cf; --budget: #ff6b6b; --back: #e09f5a;
  --in-place: #a3b18a; --waited: #c49bf0; --good: #74c69d; --act: #f4a261; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1000px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 23px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); } a { color: var(--resident); }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(176px, 1fr)); gap: 12px;
  margin: 20px 0 0; }
dl.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 10px 14px; }
dl.tiles dt { color: var(--soft); font-size: 13px; }
dl.tiles dd { margin: 0; font-size: 20px; font-weight: 600; }
dl.tiles dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
ul.advice { list-style: none; margin: 0; padding: 0; }
ul.advice li { background: var(--card); border: 1px solid var(--rule); border-left: 5px solid var(--soft);
  border-radius: 6px; padding: 9px 14px; margin: 8px 0; }
ul.advice li.act { border-left-color: var(--act); } ul.advice li.good { border-left-color: var(--good); }
ul.advice b { display: block; overflow-wrap: anywhere; } ul.advice span { overflow-wrap: anywhere; }
figure { margin: 0 0 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 14px 8px; }
figcaption { color: var(--soft); font-size: 13px; }
figcaption i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 12px; }
figcaption i:first-child { margin-left: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: system-ui, sans-serif; white-space: pre; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .step { stroke: var(--ink); stroke-opacity: 0.35; stroke-dasharray: 2 4; }
svg .budget { stroke: var(--budget); stroke-width: 1.6; stroke-dasharray: 7 4; }
svg .tip { fill: transparent; } svg .tip:hover { fill: var(--soft); fill-opacity: 0.18; }
.resident { fill: var(--resident); } .host { fill: var(--host); } .managed { fill: var(--managed); }
.to-device { fill: var(--resident); } .back { fill: var(--back); } .in-place { fill: var(--in-place); }
.waited { fill: var(--waited); }
i.resident, i.to-device { background: var(--resident); } i.host { background: var(--host); }
i.managed { background: var(--managed); } i.back { background: var(--back); }
i.in-place { background: var(--in-place); } i.waited { background: var(--waited); }
i.step { background: none; border-left: 1.5px dotted var(--ink); border-radius: 0; width: 2px; }
i.budget { background: var(--budget); height: 3px; margin-bottom: 3px; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 6px 9px; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child > * { border-bottom: none; }
td.figure, th.figure { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th[scope=row] { color: var(--ink); font-weight: 400; } td code { overflow-wrap: anywhere; }
code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; }
#by-traffic td:first-child, #by-size td:first-child { width: 48%; }
td code.source { display: block; color: var(--soft); }
@media print { body { max-width: none; } }
"""
