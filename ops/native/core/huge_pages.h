// Asking the system for huge pages.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ostinato {

// Asks for huge pages. Streaming reads of 4 KiB pages lose about 15 % to address translation and to prefetches that
// stop at page borders. The call must precede the first write.
constexpr int64_t kHugePage = 2 << 20;
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (address + bytes) / kHugePage * kHugePage;
  // If the system refuses (an old kernel, a container's policy), only speed is lost.
  if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace ostinato
