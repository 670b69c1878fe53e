// The processor's vector instructions as functions.
#pragma once

#if OSTINATO_ISA == 1 && defined(__GNUC__) && !defined(__clang__)
// GCC's <immintrin.h> declares the instructions of all processors. To parse it takes 0.7 s in each unit of a first
// start, and its parts that AVX2 needs take 0.1 s. The parts want to be included by it, which this name stands for.
#define _IMMINTRIN_H_INCLUDED
#include <xmmintrin.h>
#include <emmintrin.h>
#include <pmmintrin.h>
#include <tmmintrin.h>
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#elif OSTINATO_ISA >= 1
#include <immintrin.h>
#endif
