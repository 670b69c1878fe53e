// A device guard for CUDA that does nothing, for builds of torch without CUDA. Ops on tensors that
// claim a CUDA device ask for a guard before they do anything else.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
