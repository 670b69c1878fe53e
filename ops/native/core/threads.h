// The threads that a kernel call shares its work with: torch's own, or the process's ThreadPool.
//
// The caller chooses. graphs/threads.py sets the number of pool threads for the kernel calls of its own thread
// (ostinato_set_pool_threads); a Call carries the choice to the kernel. OpenMP's thread count is not read. Torch's
// threads are used through torch's stable ABI, so no second OpenMP runtime is loaded.
#pragma once

#include "core/tensor.h"
#include "core/thread_pool.h"

#include <type_traits>

namespace ostinato {

// The process has one thread state. All loaded libraries share that of the first library (ostinato_share_threads).
struct ThreadState {
  ThreadPool* pool;            // never deleted, because its threads use it
  int& (*num_pool_threads)();  // for the calling thread; 0 = its kernel calls run on torch's threads
};

inline ThreadState*& thread_state() {
  static ThreadState own{new ThreadPool, []() -> int& {
                           thread_local int count = 0;
                           return count;
                         }};
  static ThreadState* state = &own;
  return state;
}

class Threads {
 public:
  // The choice of the calling thread.
  static Threads of_caller();

  // How many threads a kernel may use.
  int count() const { return count_; }

  // Runs body(worker) for worker in [0, num_workers) and waits for all of them. Workers may share a thread, so a worker
  // must not wait for another.
  template <class Body>
  void run(int num_workers, Body&& body) const {
    using Function = std::remove_reference_t<Body>;
    run_parts(num_workers, [](void* context, int worker) { (*static_cast<Function*>(context))(worker); }, &body);
  }

 private:
  void run_parts(int num_workers, ThreadPool::Part part, void* context) const;

  ThreadPool* pool_ = nullptr;  // null = torch's threads
  int count_ = 1;
};

}  // namespace ostinato
