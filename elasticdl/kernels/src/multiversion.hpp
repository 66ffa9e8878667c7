// One function for several processors: ELASTICDL_CLONES before a function compiles it for AVX2 and AVX-512 too, and the
// dynamic linker chooses.  All versions give the same bits: the build forbids contraction to fused multiply-add.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define ELASTICDL_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define ELASTICDL_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define ELASTICDL_CLONES
#endif
