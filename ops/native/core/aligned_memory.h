// Aligned memory that the destructor of its owner frees. The header <memory> would take a quarter of a second to parse.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace ostinato {

class AlignedMemory {
 public:
  AlignedMemory() = default;
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  ~AlignedMemory() { std::free(data_); }

  // Null before the first allocation.
  void* data() const { return data_; }

  // Frees the old memory and allocates `size` bytes, uninitialised. `alignment` divides `size`. If the allocation
  // fails, throws std::bad_alloc, and this object holds no memory.
  void allocate(size_t alignment, size_t size) {
    std::free(data_);
    data_ = std::aligned_alloc(alignment, size);
    if (data_ == nullptr) throw std::bad_alloc();
  }

 private:
  void* data_ = nullptr;
};

}  // namespace ostinato
