// "cuda" for a torch that was built without it: eight devices of which nothing is ever asked.
//
// A CPU build lacks two things before autograd accepts fake tensors on cuda: a device guard, without which the process
// ends ("PyTorch is not linked with support for cuda devices"), and the hooks by which at::accelerator finds CUDA
// ("Cannot access accelerator device when none is available"). The hooks are looked up once, while torch is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
namespace {

constexpr c10::DeviceIndex kNumDevices = 8;
thread_local c10::DeviceIndex current = 0;

c10::Device cuda(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::CUDA, index < 0 ? current : index);
}

// Streams and events order nothing: no kernel ever runs.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return cuda(current); }
  void setDevice(c10::Device device) const override { current = cuda(device.index()).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = cuda(device.index()).index(); }
  c10::Stream defaultOf(c10::Device device) const { return c10::Stream(c10::Stream::DEFAULT, cuda(device.index())); }
  c10::Stream getStream(c10::Device device) const override { return defaultOf(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return defaultOf(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return defaultOf(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return defaultOf(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return defaultOf(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int nothing;
    *event = &nothing;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct PretendedCUDA final : public at::CUDAHooksInterface {
  explicit PretendedCUDA(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return kNumDevices; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  std::string showConfig() const override { return "pretended"; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendedCUDA)

}  // namespace

void register_guard() {
  static Guard guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}

}  // namespace at

// Returns the number of devices; 0 if torch has already looked for CUDA without finding these hooks.
extern "C" int register_fake_cuda() {
  at::register_guard();
  return at::detail::getCUDAHooks().hasCUDA() ? at::kNumDevices : 0;
}
