// A group of processes, one for each tensor-parallel rank, that exchange values through shared memory.
//
// The segment has a header and two slots for each rank. A value that is larger than a slot is exchanged in pieces. For
// each piece a rank writes its part into one of its slots, publishes a sequence number, waits until all ranks have
// published that number, and reads the slots. A rank publishes piece p + 1 after it has read piece p. So once all ranks
// have published p + 1, all have read p, and a rank may write p + 2 into the slot of p. No second barrier is needed.
//
// A piece may have one reader (`gather`) or one writer (`broadcast`). The other ranks publish its number too, the
// writers when they have written it, and go on. They wait only before they write the piece after the next.
//
// Ranks on other machines have slots here too. A process of this machine, the bridge, writes them (segment.py). The
// bridge learns from an eventfd that a rank of this machine has published a piece, and sends that piece to the other
// machines. The rule above holds for its copies: a rank elsewhere sends p + 2 when it has read p + 1 of all ranks of
// this machine.
//
// A waiting rank spins for a short time, because ranks reach an exchange within microseconds of each other. Then it
// sleeps on a futex, so that it uses no processor while another rank is late.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ostinato::collectives {

constexpr int kMaxRanks = 32;
constexpr int64_t kHeaderBytes = 4096;

// The beginning of the segment. segment.py writes the first three fields, and has the offsets of the others.
struct Header {
  uint32_t magic, world, slot_bytes;
  alignas(64) std::atomic<uint32_t> aborted;  // 1 = all waits of all ranks end with an error
  struct alignas(64) Rank {
    std::atomic<uint32_t> published;  // number of the last piece that this rank has written; wraps around
    std::atomic<uint32_t> num_sleeping;  // ranks that sleep until `published` changes
    uint32_t bytes[2];  // of the piece in each slot; the bridge alone reads them
  } ranks[kMaxRanks];
};
static_assert(sizeof(Header) <= kHeaderBytes && std::atomic<uint32_t>::is_always_lock_free);
static_assert(offsetof(Header, ranks) == 128 && sizeof(Header::Rank) == 64 && offsetof(Header::Rank, bytes) == 8);

// One rank's membership. One thread at a time may use it, except for `abort`.
class Group {
 public:
  using Clock = std::chrono::steady_clock;

  // notify: an eventfd that is signalled after each piece of this rank; -1 = all ranks are on this machine.
  Group(void* memory, int64_t bytes, int rank, std::chrono::microseconds spin, std::chrono::milliseconds timeout,
        int notify)
      : header_(static_cast<Header*>(memory)), bytes_(bytes), rank_(rank), spin_(spin), timeout_(timeout),
        notify_(notify), sequence_(header_->ranks[rank].published.load()) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    munmap(header_, bytes_);
    if (notify_ >= 0) close(notify_);
  }

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(header_->world); }
  int64_t slot_bytes() const { return header_->slot_bytes; }

  // Passes `count` elements of `element_bytes` through the slots, in pieces.
  //
  // write(first, size, own) copies elements [first, first + size) of this rank into its slot.
  // read(first, size, slot_of) reads the same elements of all ranks; slot_of(rank) is the slot of a rank.
  template <class Write, class Read>
  void exchange(int64_t count, int64_t element_bytes, const Write& write, const Read& read) {
    check_open();
    const int64_t piece = slot_bytes() / element_bytes;
    for (int64_t first = 0; first < count; first += piece) {
      const int64_t size = std::min(piece, count - first);
      begin_piece();
      write(first, size, slot(rank_));
      publish(size * element_bytes);
      wait_for_others();
      read(first, size, [this](int rank) -> const char* { return slot(rank); });
    }
  }

  // As `exchange`, but only the rank `reader` reads, and it does not write. The others return when they have written.
  template <class Write, class Read>
  void gather(int reader, int64_t count, int64_t element_bytes, const Write& write, const Read& read) {
    check_open();
    const int64_t piece = slot_bytes() / element_bytes;
    for (int64_t first = 0; first < count; first += piece) {
      const int64_t size = std::min(piece, count - first);
      begin_piece();
      if (rank_ == reader) {
        publish(0);
        wait_for_others();
        read(first, size, [this](int rank) -> const char* { return slot(rank); });
      } else {
        write(first, size, slot(rank_));
        publish(size * element_bytes);
      }
    }
  }

  // Passes `count` elements of the rank `writer` to all others. The writer returns when it has written them.
  //
  // write(first, size, own) as for `exchange`; read(first, size, slot) is called on the other ranks.
  template <class Write, class Read>
  void broadcast(int writer, int64_t count, int64_t element_bytes, const Write& write, const Read& read) {
    check_open();
    const int64_t piece = slot_bytes() / element_bytes;
    for (int64_t first = 0; first < count; first += piece) {
      const int64_t size = std::min(piece, count - first);
      begin_piece();
      if (rank_ == writer) {
        write(first, size, slot(rank_));
        publish(size * element_bytes);
      } else {
        publish(0);
        wait_for(writer);
        read(first, size, static_cast<const char*>(slot(writer)));
      }
    }
  }

  // Ends all present and later waits of all ranks with an error. Any thread may call it.
  void abort() {
    header_->aborted.store(1);
    for (int rank = 0; rank < world(); ++rank) wake(header_->ranks[rank].published);
  }

 private:
  char* slot(int rank) const {
    return reinterpret_cast<char*>(header_) + kHeaderBytes + (2 * rank + (sequence_ & 1)) * slot_bytes();
  }

  void check_open() const {
    if (header_->aborted.load(std::memory_order_relaxed) != 0) fail("the group of ranks was ended");
  }

  // Waits until the slot of the next piece is free: all ranks have published the present piece, so they have read the
  // one before it. After an `exchange` that is so already.
  void begin_piece() {
    wait_for_others();
    ++sequence_;
  }

  void wait_for_others() {
    for (int rank = 0; rank < world(); ++rank) {
      if (rank != rank_) wait_for(rank);
    }
  }

  // bytes: how many bytes of the present piece this rank has written.
  void publish(int64_t bytes) {
    Header::Rank& own = header_->ranks[rank_];
    own.bytes[sequence_ & 1] = static_cast<uint32_t>(bytes);
    // These operations, and those of a rank that is about to sleep, are sequentially consistent. So either this rank
    // sees that the other rank sleeps, or the other rank sees the new number and stays awake.
    own.published.store(sequence_);
    if (own.num_sleeping.load() != 0) wake(own.published);
    if (notify_ < 0) return;
    const uint64_t one = 1;
    if (::write(notify_, &one, sizeof one) != sizeof one) fail("the eventfd of the bridge to other machines cannot be written");
  }

  void wait_for(int rank) {
    Header::Rank& peer = header_->ranks[rank];
    const auto has_come = [&] {
      return static_cast<int32_t>(peer.published.load(std::memory_order_acquire) - sequence_) >= 0;
    };
    if (has_come()) return;
    const auto begin = Clock::now();
    while (Clock::now() - begin < spin_) {
      for (int i = 0; i < 32; ++i) {
        pause();
        if (has_come()) return;
      }
    }
    const Sleeping sleeping(peer.num_sleeping);
    while (true) {
      const uint32_t seen = peer.published.load();
      if (static_cast<int32_t>(seen - sequence_) >= 0) return;
      if (header_->aborted.load() != 0) fail("the group of ranks was ended while rank " + std::to_string(rank) + " was awaited");
      if (Clock::now() - begin > timeout_) {
        abort();
        fail("rank " + std::to_string(rank) + " of " + std::to_string(world()) + " did not join the exchange within " +
             std::to_string(timeout_.count()) + " ms");
      }
      sleep_on(peer.published, seen);
    }
  }

  struct Sleeping {
    explicit Sleeping(std::atomic<uint32_t>& number) : count(number) { count.fetch_add(1); }
    ~Sleeping() { count.fetch_sub(1); }
    std::atomic<uint32_t>& count;
  };

  [[noreturn]] void fail(const std::string& reason) const {
    throw std::runtime_error("rank " + std::to_string(rank_) + ": " + reason);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Sleeps for at most 20 ms. Then the caller checks `aborted` and the time, and may call again.
  static void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec most{0, 20'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0); }

  Header* header_;
  int64_t bytes_;
  int rank_;
  std::chrono::microseconds spin_;
  std::chrono::milliseconds timeout_;
  int notify_;
  uint32_t sequence_;  // the number of the last piece; the same on all ranks
};

}  // namespace ostinato::collectives
