#pragma once
#include "kernels/activation.h"
#include "kernels/cross_entropy.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

// The work of the CPU kernels on a part [begin, end) of their range, on one thread. Each op's file is compiled once per
// instruction set; dispatch.cpp shares the ranges out between threads and picks the set that the processor has.
namespace timelyfreeze::kernels {

struct Plain {};   // whatever the compiler's default is
struct Avx2 {};    // AVX2, FMA and F16C
struct Avx512 {};  // those and AVX-512 F, BW, DQ and VL

// Of rows.
template <class InstructionSet>
void norm_forward_rows(const NormShape& shape, const NormForward& arrays, int64_t begin, int64_t end);

template <class InstructionSet>
void norm_backward_rows(const NormShape& shape, const NormBackward& arrays, int64_t begin, int64_t end);

// Of partial sums: the rows that each of them sums.
template <class InstructionSet>
void norm_backward_partials(const NormShape& shape, const NormBackward& arrays, int64_t begin, int64_t end);

// Of elements of the output.
template <class InstructionSet>
void activation_forward_elements(const ActivationShape& shape, const void* x, void* y, int64_t begin, int64_t end);

template <class InstructionSet>
void activation_backward_elements(const ActivationShape& shape, const void* x, const void* dy, void* dx, int64_t begin,
                                  int64_t end);

// Of positions, counted over batch and length: each with all its heads.
template <class InstructionSet>
void rope_positions(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines,
                    int64_t begin, int64_t end);

// Of rows.
template <class InstructionSet>
void cross_entropy_rows(const CrossEntropyShape& shape, void* logits, const int64_t* target, void* loss,
                        bool wants_gradient, int64_t begin, int64_t end);

}  // namespace timelyfreeze::kernels
