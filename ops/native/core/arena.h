// Memory for the results of a CpuGraph's kernels.
#pragma once

#include "core/huge_pages.h"

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace ostinato {

// Hands out memory from front to back. `reset` frees all of it at once. The arena grows until it holds the results of
// the largest step. After that it never asks the system for memory.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  // 64-byte aligned, uninitialised.
  void* allocate(int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || used_ + bytes > chunks_.back().bytes) {
      const int64_t size = bytes > total_ ? bytes : total_;  // at least doubles the total
      const int64_t page = size < kHugePage ? 64 : kHugePage;
      void* memory = std::aligned_alloc(page, (size + page - 1) / page * page);
      if (memory == nullptr) throw std::bad_alloc();
      prefer_huge_pages(memory, size);
      chunks_.push_back({memory, size});
      total_ += size;
      used_ = 0;
    }
    char* result = static_cast<char*>(chunks_.back().memory) + used_;
    used_ += bytes;
    return result;
  }

  // Frees all memory that was handed out, and joins the chunks into one chunk of their total size.
  void reset() {
    used_ = 0;
    if (chunks_.size() < 2) return;
    const int64_t total = total_;
    release();
    allocate(total);
    used_ = 0;
  }

 private:
  struct Chunk {
    void* memory;
    int64_t bytes;
  };
  void release() {
    for (const Chunk& chunk : chunks_) std::free(chunk.memory);
    chunks_.clear();
    total_ = used_ = 0;
  }
  std::vector<Chunk> chunks_;
  int64_t total_ = 0;
  int64_t used_ = 0;
};

}  // namespace ostinato
