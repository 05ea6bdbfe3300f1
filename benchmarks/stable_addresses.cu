// What CUDA's virtual memory management costs: one address for a storage whose pages are the device's or the host's.
// docs/stable-addresses.md reads the figures. Plain memory only, under 2 GiB.
//   nvcc -std=c++20 -O2 -arch=sm_90 benchmarks/stable_addresses.cu -lcuda -o build/stable_addresses
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
using clk = std::chrono::steady_clock;
static double us(clk::time_point a, clk::time_point b) {
  return std::chrono::duration<double, std::micro>(b - a).count();
}
#define D(x)                                         \
  do {                                               \
    CUresult r = (x);                                \
    if (r) {                                         \
      const char* s;                                 \
      cuGetErrorString(r, &s);                       \
      printf("%s: %s (line %d)\n", #x, s, __LINE__); \
    }                                                \
  } while (0)
#define R(x)                                                             \
  do {                                                                   \
    cudaError_t r = (x);                                                 \
    if (r)                                                               \
      printf("%s: %s (line %d)\n", #x, cudaGetErrorString(r), __LINE__); \
  } while (0)
__global__ void spin(long long c) {
  long long t = clock64();
  while (clock64() - t < c)
    ;
}
__global__ void readall(const float4* p, size_t n, float* o) {
  float s = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float4 v = p[i];
    s += v.x + v.y + v.z + v.w;
  }
  if (s == 12345.f)
    *o = s;
}
__global__ void writeall(float4* p, size_t n, float v) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = make_float4(v, v, v, v);
}
__global__ void rw(float4* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float4 v = p[i];
    v.x += 1;
    p[i] = v;
  }
}
struct St {
  std::vector<double> v;
  void add(double x) {
    v.push_back(x);
  }
  void show(const char* n) {
    std::sort(v.begin(), v.end());
    printf("  %-22s med %8.1f  p95 %8.1f  max %8.1f us\n", n, v[v.size() / 2], v[v.size() * 95 / 100], v.back());
  }
};
CUmemAllocationProp dev{}, host{};
CUmemAccessDesc acc[2];
CUdeviceptr va;
void cycle(const char* what, size_t chunk, int pieces, int n, cudaStream_t s, bool busy, cudaStream_t side,
           CUmemAllocationProp* prop) {
  std::vector<CUmemGenericAllocationHandle> h(pieces);
  St c, m, a, u, l, r;
  for (auto& x : h) {
    auto t = clk::now();
    D(cuMemCreate(&x, chunk, prop, 0));
    c.add(us(t, clk::now()));
  }
  size_t tot = chunk * pieces;
  cudaEvent_t e;
  cudaEventCreate(&e);
  for (int i = 0; i < n; ++i) {
    if (busy) {
      spin<<<64, 256, 0, s>>>(20000000LL);
    }
    auto t0 = clk::now();
    for (int k = 0; k < pieces; ++k)
      D(cuMemMap(va + k * chunk, chunk, 0, h[k], 0));
    auto t1 = clk::now();
    D(cuMemSetAccess(va, tot, acc, prop == &host ? 2 : 1));
    auto t2 = clk::now();
    spin<<<1, 1, 0, side>>>(1000);
    auto t3 = clk::now();
    cudaStreamSynchronize(side);
    auto t4 = clk::now();
    D(cuMemUnmap(va, tot));
    auto t5 = clk::now();
    m.add(us(t0, t1));
    a.add(us(t1, t2));
    l.add(us(t2, t3));
    r.add(us(t3, t4));
    u.add(us(t4, t5));
    if (busy)
      cudaStreamSynchronize(s);
  }
  printf("%s: %zu MiB in %d pieces%s\n", what, tot >> 20, pieces, busy ? ", a 10 ms kernel running" : "");
  c.show("create (a piece)");
  m.show("map (all pieces)");
  a.show("set access (once)");
  l.show("a launch after");
  r.show("and its end");
  u.show("unmap (once)");
  for (auto& x : h)
    D(cuMemRelease(x));
}
int main() {
  R(cudaSetDevice(0));
  R(cudaFree(0));
  CUdevice d;
  D(cuDeviceGet(&d, 0));
  dev.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  dev.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  host.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  host.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
  acc[0].location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  acc[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  acc[1].location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
  acc[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  size_t g = 0, gh = 0;
  D(cuMemGetAllocationGranularity(&g, &dev, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  D(cuMemGetAllocationGranularity(&gh, &host, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  printf("granularity device %zu KiB, host %zu KiB\n", g >> 10, gh >> 10);
  D(cuMemAddressReserve(&va, 64ull << 30, 0, 0, 0));
  cudaStream_t s, side;
  cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
  spin<<<1, 1, 0, s>>>(1000);
  R(cudaDeviceSynchronize());
  for (bool busy : {false, true})
    for (auto [c, p] : std::vector<std::pair<size_t, int>>{{2, 1}, {32, 1}, {128, 1}, {2, 16}, {2, 64}, {32, 4}})
      cycle("device", c << 20, p, busy ? 20 : 60, s, busy, side, &dev);
  for (bool busy : {false, true})
    for (auto [c, p] : std::vector<std::pair<size_t, int>>{{32, 1}, {128, 1}})
      cycle("host", c << 20, p, busy ? 10 : 30, s, busy, side, &host);
  // kernels from one thread while another maps and unmaps
  {
    CUmemGenericAllocationHandle h[16];
    for (auto& x : h)
      D(cuMemCreate(&x, 2 << 20, &dev, 0));
    float4* buf;
    float* o;
    R(cudaMalloc(&buf, 1 << 30));
    R(cudaMalloc(&o, 4));
    writeall<<<1024, 256, 0, s>>>(buf, (1 << 30) / 16, 1.f);
    cudaStreamSynchronize(s);
    for (int with = 0; with < 2; ++with) {
      std::atomic<bool> stop{false};
      long maps = 0;
      std::thread t([&] {
        while (!stop) {
          if (with) {
            for (int k = 0; k < 16; ++k)
              cuMemMap(va + ((size_t)k << 21), 2 << 20, 0, h[k], 0);
            cuMemSetAccess(va, 32 << 20, acc, 1);
            cuMemUnmap(va, 32 << 20);
            ++maps;
          } else
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
      auto t0 = clk::now();
      St l;
      for (int i = 0; i < 5000; ++i) {
        auto a = clk::now();
        spin<<<132, 256, 0, s>>>(20000);
        l.add(us(a, clk::now()));
        if (i % 50 == 49)
          cudaStreamSynchronize(s);
      }
      cudaStreamSynchronize(s);
      double small = us(t0, clk::now());
      t0 = clk::now();
      for (int i = 0; i < 300; ++i)
        readall<<<132 * 8, 512, 0, s>>>(buf, (1 << 30) / 16, o);
      cudaStreamSynchronize(s);
      double big = us(t0, clk::now());
      stop = true;
      t.join();
      printf("%s maps of 32 MiB beside (%ld): 5000 kernels of 10 us %.1f ms, 300 reads of 1 GiB %.1f GB/s\n",
             with ? "with" : "without", maps, small / 1e3, 300.0 * (1 << 30) / big / 1e3);
      l.show("launch");
    }
    for (auto& x : h)
      cuMemRelease(x);
    R(cudaFree(buf));
  }
  // copies and overlap
  {
    size_t n = 256 << 20;
    CUmemGenericAllocationHandle hd, hh;
    D(cuMemCreate(&hd, n, &dev, 0));
    auto t0 = clk::now();
    D(cuMemCreate(&hh, n, &host, 0));
    printf("host create 256 MiB %.1f ms\n", us(t0, clk::now()) / 1e3);
    CUdeviceptr vd = va, vh = va + (1ull << 30);
    D(cuMemMap(vd, n, 0, hd, 0));
    D(cuMemSetAccess(vd, n, acc, 1));
    t0 = clk::now();
    D(cuMemMap(vh, n, 0, hh, 0));
    D(cuMemSetAccess(vh, n, acc, 2));
    printf("host map 256 MiB %.1f us\n", us(t0, clk::now()));
    t0 = clk::now();
    memset((void*)vh, 1, n);
    printf("CPU writes host pages %.1f GB/s\n", n / us(t0, clk::now()) / 1e3);
    float* o;
    R(cudaMalloc(&o, 4));
    void* pin;
    R(cudaMallocHost(&pin, n));
    memset(pin, 2, n);
    auto bw = [&](const char* w, auto f) {
      f();
      cudaStreamSynchronize(s);
      auto a = clk::now();
      f();
      auto b = clk::now();
      cudaStreamSynchronize(s);
      auto c = clk::now();
      printf("  %-46s call %8.1f us, %7.1f GB/s\n", w, us(a, b), n / us(a, c) / 1e3);
    };
    bw("host VMM -> device VMM, async copy", [&] { cudaMemcpyAsync((void*)vd, (void*)vh, n, cudaMemcpyDefault, s); });
    bw("device VMM -> host VMM, async copy", [&] { cudaMemcpyAsync((void*)vh, (void*)vd, n, cudaMemcpyDefault, s); });
    bw("cudaMallocHost -> device VMM", [&] { cudaMemcpyAsync((void*)vd, pin, n, cudaMemcpyDefault, s); });
    bw("device VMM -> cudaMallocHost", [&] { cudaMemcpyAsync(pin, (void*)vd, n, cudaMemcpyDefault, s); });
    bw("kernel reads host VMM in place", [&] { readall<<<132 * 8, 512, 0, s>>>((float4*)vh, n / 16, o); });
    bw("kernel writes host VMM in place", [&] { writeall<<<132 * 8, 512, 0, s>>>((float4*)vh, n / 16, 3.f); });
    bw("kernel reads and writes host VMM in place", [&] { rw<<<132 * 8, 512, 0, s>>>((float4*)vh, n / 16); });
    bw("kernel reads device VMM", [&] { readall<<<132 * 8, 512, 0, s>>>((float4*)vd, n / 16, o); });
    // overlap of copies both ways with a kernel
    cudaStream_t c1, c2;
    cudaStreamCreateWithFlags(&c1, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&c2, cudaStreamNonBlocking);
    CUdeviceptr v2 = va + (2ull << 30);
    CUmemGenericAllocationHandle h2;
    D(cuMemCreate(&h2, n, &dev, 0));
    D(cuMemMap(v2, n, 0, h2, 0));
    D(cuMemSetAccess(v2, n, acc, 1));
    void* pin2;
    R(cudaMallocHost(&pin2, n));
    auto all = [&](bool k, bool in, bool out) {
      R(cudaDeviceSynchronize());
      auto a = clk::now();
      for (int i = 0; i < 20; ++i) {
        if (k)
          spin<<<132, 256, 0, s>>>(9000000);
        if (in)
          cudaMemcpyAsync((void*)vd, pin, n, cudaMemcpyDefault, c1);
        if (out)
          cudaMemcpyAsync(pin2, (void*)v2, n, cudaMemcpyDefault, c2);
      }
      R(cudaDeviceSynchronize());
      return us(a, clk::now()) / 20e3;
    };
    printf("ms: kernel %.2f, in %.2f, out %.2f, in+out %.2f, kernel+in %.2f, kernel+in+out %.2f\n", all(1, 0, 0),
           all(0, 1, 0), all(0, 0, 1), all(0, 1, 1), all(1, 1, 0), all(1, 1, 1));
    // the same address, first on the device, then on the host, then back
    writeall<<<132, 512, 0, s>>>((float4*)vd, n / 16, 7.f);
    cudaStreamSynchronize(s);
    cudaMemcpyAsync((void*)vh, (void*)vd, n, cudaMemcpyDefault, s);
    cudaStreamSynchronize(s);
    t0 = clk::now();
    D(cuMemUnmap(vd, n));
    D(cuMemUnmap(vh, n));
    D(cuMemMap(vd, n, 0, hh, 0));
    D(cuMemSetAccess(vd, n, acc, 2));
    printf("remap device -> host %.1f us; CPU reads %.1f there\n", us(t0, clk::now()), ((float*)vd)[n / 4 - 1]);
    rw<<<132, 512, 0, s>>>((float4*)vd, n / 16);
    cudaStreamSynchronize(s);
    printf("after the kernel CPU reads %.1f\n", ((float*)vd)[0]);
    // a graph captured on the address, replayed after a remap to other device pages
    D(cuMemUnmap(vd, n));
    D(cuMemMap(vd, n, 0, hd, 0));
    D(cuMemSetAccess(vd, n, acc, 1));
    cudaGraph_t gr;
    cudaGraphExec_t ge;
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    rw<<<132, 512, 0, s>>>((float4*)vd, n / 16);
    cudaStreamEndCapture(s, &gr);
    R(cudaGraphInstantiate(&ge, gr, 0));
    writeall<<<132, 512, 0, s>>>((float4*)vd, n / 16, 7.f);
    R(cudaGraphLaunch(ge, s));
    cudaStreamSynchronize(s);
    D(cuMemUnmap(vd, n));
    D(cuMemUnmap(v2, n));
    D(cuMemMap(vd, n, 0, h2, 0));
    D(cuMemSetAccess(vd, n, acc, 1));
    writeall<<<132, 512, 0, s>>>((float4*)vd, n / 16, 20.f);
    R(cudaGraphLaunch(ge, s));
    float v[2];
    R(cudaMemcpyAsync(v, (void*)vd, 8, cudaMemcpyDefault, s));
    R(cudaStreamSynchronize(s));
    printf("graph after a remap: %.1f (21)\n", v[0]);
  }
  // many small: a step of 300 storages of 6 MiB through a ring of 2 MiB handles, fetch and retire
  {
    int pieces = 3, n = 300;
    std::vector<CUmemGenericAllocationHandle> h(pieces * 40);
    for (auto& x : h)
      D(cuMemCreate(&x, 2 << 20, &dev, 0));
    cudaStream_t c1;
    cudaStreamCreateWithFlags(&c1, cudaStreamNonBlocking);
    void* pin;
    R(cudaMallocHost(&pin, 6 << 20));
    CUdeviceptr b = va + (8ull << 30);
    for (int round = 0; round < 2; ++round) {
      St m, u;
      auto t0 = clk::now();
      for (int i = 0; i < n; ++i) {
        size_t off = (size_t)i * (8ull << 20);
        if (i >= 40) {
          auto a = clk::now();
          D(cuMemUnmap(b + (size_t)(i - 40) * (8ull << 20), 6 << 20));
          u.add(us(a, clk::now()));
        }
        auto a = clk::now();
        for (int k = 0; k < pieces; ++k)
          D(cuMemMap(b + off + ((size_t)k << 21), 2 << 20, 0, h[(i % 40) * pieces + k], 0));
        D(cuMemSetAccess(b + off, 6 << 20, acc, 1));
        m.add(us(a, clk::now()));
        cudaMemcpyAsync((void*)(b + off), pin, 6 << 20, cudaMemcpyDefault, c1);
      }
      cudaStreamSynchronize(c1);
      double t = us(t0, clk::now());
      printf("300 fetches of 6 MiB through 40 places: %.1f ms, %.1f GB/s\n", t / 1e3, n * (6.0 * (1 << 20)) / t / 1e3);
      m.show("map + access");
      u.show("unmap");
      for (int i = n - 40; i < n; ++i)
        D(cuMemUnmap(b + (size_t)i * (8ull << 20), 6 << 20));
    }
  }
  puts("done");
  return 0;
}
