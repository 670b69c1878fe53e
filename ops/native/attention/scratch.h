// The memory of one worker of attention.
#pragma once

#include "core/aligned_memory.h"

#include <cstddef>

namespace ostinato::attention {

// One allocation that grows and is kept by its thread.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t begin = used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return is_measuring_ ? nullptr : reinterpret_cast<T*>(static_cast<char*>(memory_.data()) + begin);
  }
  // Runs `layout` twice: first to measure how many bytes it takes, then with that memory. A loop, so that `layout` is
  // compiled once.
  template <class Layout>
  void lay_out(Layout&& layout) {
    for (is_measuring_ = true;; is_measuring_ = false) {
      used_ = 0;
      layout();
      if (!is_measuring_) return;
      if (used_ <= size_) continue;
      size_ = 0;  // if the allocation fails, the next call tries again
      memory_.allocate(64, used_);
      size_ = used_;
    }
  }

 private:
  AlignedMemory memory_;
  size_t size_ = 0;
  size_t used_ = 0;
  bool is_measuring_ = false;
};

}  // namespace ostinato::attention
