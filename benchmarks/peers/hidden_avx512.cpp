// A preloaded library (LD_PRELOAD) that shows a program a processor with AVX2 and without AVX-512 and AMX.
//
// The library lets the processor fault at the instruction CPUID (`arch_prctl(ARCH_SET_CPUID, 0)`; `/proc/cpuinfo` names
// this `cpuid_fault`). The handler of SIGSEGV runs the instruction, clears the bits of newer instruction sets in its
// answer, and continues after it. Threads and forked processes inherit the setting, and a started program loads the
// library again. `/proc/cpuinfo` is opened without the same flags. AVX-VNNI is hidden too, because processors that have
// only AVX2 have none.
//
// What ran before this library is not hidden: the loader chooses the C library's string functions by CPUID.
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

constexpr uint32_t bits() { return 0; }
template <class... Rest>
constexpr uint32_t bits(int first, Rest... rest) {
  return 1u << first | bits(rest...);
}

// In the order of Intel's manual, CPUID leaf 7: AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, GFNI, VAES,
// VPCLMULQDQ, VNNI, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS, VP2INTERSECT, AMX-BF16, FP16, AMX-TILE, AMX-INT8.
constexpr Registers kLeaf7 = {0, bits(16, 17, 21, 26, 27, 28, 30, 31), bits(1, 6, 8, 9, 10, 11, 12, 14),
                              bits(2, 3, 8, 22, 23, 24, 25)};
// AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA; AVX-VNNI-INT8, AVX-NE-CONVERT, AMX-COMPLEX, AVX-VNNI-INT16, AVX10.
constexpr Registers kLeaf7Part1 = {bits(4, 5, 21, 23), 0, 0, bits(4, 5, 8, 10, 19)};
constexpr uint32_t kStates = bits(5, 6, 7, 17, 18);  // register files of XSAVE: AVX-512 and AMX
const char* const kFlags[] = {"avx512", "amx_", "avx_vnni", "avx_ifma", "gfni", "vaes", "vpclmulqdq"};

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

struct sigaction others_action;  // what the program set for SIGSEGV
int (*real_sigaction)(int, const struct sigaction*, struct sigaction*);

long set_cpuid(long enabled) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, enabled); }

void hide(uint32_t leaf, uint32_t part, Registers& found) {
  const auto clear = [&](const Registers& bits) {
    found.eax &= ~bits.eax;
    found.ebx &= ~bits.ebx;
    found.ecx &= ~bits.ecx;
    found.edx &= ~bits.edx;
  };
  if (leaf == 7 && part == 0) clear(kLeaf7);
  if (leaf == 7 && part == 1) clear(kLeaf7Part1);
  // The sizes of saved registers stay: XSAVE of this processor writes so much.
  if (leaf == 0xd && part == 0) clear({kStates, 0, 0, 0});
  const bool state = leaf == 0xd && part < 32 && (kStates >> part & 1);
  if (state || leaf == 0x1d || leaf == 0x1e || leaf == 0x24) found = {0, 0, 0, 0};  // tiles, AVX10
}

void on_fault(int number, siginfo_t* info, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  // A general protection fault has no address, so the instruction can be read.
  if (info->si_code == SI_KERNEL && memcmp(reinterpret_cast<void*>(registers[REG_RIP]), "\x0f\xa2", 2) == 0) {
    const int error = errno;
    const auto leaf = static_cast<uint32_t>(registers[REG_RAX]), part = static_cast<uint32_t>(registers[REG_RCX]);
    Registers found;
    set_cpuid(1);
    __cpuid_count(leaf, part, found.eax, found.ebx, found.ecx, found.edx);
    set_cpuid(0);
    hide(leaf, part, found);
    registers[REG_RAX] = found.eax;
    registers[REG_RBX] = found.ebx;
    registers[REG_RCX] = found.ecx;
    registers[REG_RDX] = found.edx;
    registers[REG_RIP] += 2;
    errno = error;
    return;
  }
  if (others_action.sa_flags & SA_SIGINFO) return others_action.sa_sigaction(number, info, context);
  if (others_action.sa_handler != SIG_DFL && others_action.sa_handler != SIG_IGN) {
    return others_action.sa_handler(number);
  }
  struct sigaction fallback = {};
  fallback.sa_handler = SIG_DFL;  // the instruction faults again, and the process ends
  real_sigaction(SIGSEGV, &fallback, nullptr);
}

// Flags of /proc/cpuinfo without the hidden ones, as a file in memory; -1 on failure.
int open_shown_cpuinfo() {
  FILE* source = fdopen(static_cast<int>(syscall(SYS_openat, AT_FDCWD, "/proc/cpuinfo", O_RDONLY | O_CLOEXEC)), "r");
  const int shown = memfd_create("cpuinfo", MFD_CLOEXEC);
  if (source == nullptr || shown < 0) return -1;
  char* line = nullptr;
  size_t size = 0;
  for (ssize_t length; (length = getline(&line, &size, source)) > 0;) {
    char* place = nullptr;
    const bool flags = strncmp(line, "flags", 5) == 0;
    for (char* word = flags ? strtok_r(line, " \n", &place) : nullptr; word; word = strtok_r(nullptr, " \n", &place)) {
      bool hidden = false;
      for (const char* flag : kFlags) hidden |= strncmp(word, flag, strlen(flag)) == 0;
      if (!hidden) dprintf(shown, "%s ", word);
    }
    if (flags) dprintf(shown, "\n");
    if (!flags && write(shown, line, length) != length) return -1;
  }
  free(line);
  fclose(source);
  lseek(shown, 0, SEEK_SET);
  return shown;
}

bool is_cpuinfo(const char* path) { return path != nullptr && strcmp(path, "/proc/cpuinfo") == 0; }

// A set of signals without SIGSEGV. A thread that blocks SIGSEGV would be killed by its next CPUID.
const sigset_t* unblocked(int how, const sigset_t* set, sigset_t& copy) {
  if (set == nullptr || how == SIG_UNBLOCK) return set;
  copy = *set;
  sigdelset(&copy, SIGSEGV);
  return &copy;
}

}  // namespace

extern "C" {

int sigaction(int number, const struct sigaction* action, struct sigaction* old) noexcept {
  if (real_sigaction == nullptr) real_sigaction = next(&sigaction, "sigaction");
  if (number != SIGSEGV) return real_sigaction(number, action, old);
  if (old != nullptr) *old = others_action;
  if (action != nullptr) others_action = *action;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) noexcept {
  static auto* const real = next(&signal, "signal");
  if (number != SIGSEGV) return real(number, handler);
  struct sigaction action = {}, old;
  action.sa_handler = handler;
  sigaction(number, &action, &old);
  return old.sa_handler;
}

int sigprocmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  static auto* const real = next(&sigprocmask, "sigprocmask");
  sigset_t copy;
  return real(how, unblocked(how, set, copy), old);
}

int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  static auto* const real = next(&pthread_sigmask, "pthread_sigmask");
  sigset_t copy;
  return real(how, unblocked(how, set, copy), old);
}

#define OPEN(NAME)                                                                     \
  int NAME(const char* path, int flags, ...) {                                         \
    if (is_cpuinfo(path)) return open_shown_cpuinfo();                                 \
    va_list more;                                                                      \
    va_start(more, flags);                                                             \
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;    \
    va_end(more);                                                                      \
    static auto* const real = next(&NAME, #NAME);                                      \
    return real(path, flags, mode);                                                    \
  }
OPEN(open)
OPEN(open64)

#define FOPEN(NAME)                                                          \
  FILE* NAME(const char* path, const char* mode) {                           \
    if (is_cpuinfo(path)) return fdopen(open_shown_cpuinfo(), mode);         \
    static auto* const real = next(&NAME, #NAME);                            \
    return real(path, mode);                                                 \
  }
FOPEN(fopen)
FOPEN(fopen64)

}  // extern "C"

[[gnu::constructor]] static void hide_from_here() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  real_sigaction = next(&sigaction, "sigaction");
  if (real_sigaction(SIGSEGV, &action, &others_action) != 0 || set_cpuid(0) != 0) {
    fprintf(stderr, "CPUID cannot be intercepted on this machine: %s\n", strerror(errno));
    _exit(78);
  }
}
