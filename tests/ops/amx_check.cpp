// Multiplies tiles that it reads from stdin and writes the results to stdout. test_amx.py compiles it for the processor
// and for the emulation.
//
// stdin: any number of problems. A problem is three int32, which are the kind (0 bfloat16, 1 int8 times uint8,
// 2 int8 times int8), the rows M and the steps K, then the bytes A [16][64], B [16][64] and C [16][64].
// stdout: the bytes C [16][64] of each problem.
#include "core/amx.h"

#include <cstdio>

#if OSTINATO_AMX == 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace ostinato::amx;

int main() {
#if OSTINATO_AMX == 1
  constexpr int kArchPrctl = 158, kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(kArchPrctl, kRequestPermission, kTileData) != 0) return 3;
#endif
  struct {
    int32_t kind, rows, steps;
    unsigned char a[16][64], b[16][64], c[16][64];
  } problem;
  while (std::fread(&problem, sizeof problem, 1, stdin) == 1) {
    TileShapes shapes;
    shapes.set(0, 1, problem.rows, 64);
    shapes.set(1, 2, problem.rows, problem.steps * 4);
    shapes.set(2, 3, problem.steps, 64);
    {
      TileScope scope(shapes);
      load<0>(problem.c, 64);
      load<1>(problem.a, 64);
      load<2>(problem.b, 64);
      switch (problem.kind) {
        case 0: multiply_bfloat16<0, 1, 2>(); break;
        case 1: multiply_bytes<0, 1, 2>(); break;
        case 2: multiply_signed_bytes<0, 1, 2>(); break;
      }
      store<0>(problem.c, 64);
    }
    std::fwrite(problem.c, sizeof problem.c, 1, stdout);
  }
  return 0;
}
