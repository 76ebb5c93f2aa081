// What MindSpore's CPU backend has no good kernel for, as operators of ops.Custom ("aot"), for float32.
//
// AssignAdd writes each sum twice and is not vectorized. A product, a zero tensor or squares that are then assigned or
// summed go through memory twice as often as need be, and take another tensor of it.
//
// A kernel is given its inputs and its result, and returns 0 if it could use them. Numbers that are the same for many
// tensors come first, so that a graph can map the rest over these tensors. MindSpore asks for the shape and the
// type of the result by the name of the kernel and "InferShape" or "InferType", also while it runs a graph whose shapes
// or types it does not know before.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#define KERNEL(name, shape)                                                                                          \
  extern "C" std::vector<int64_t> name##InferShape(int *dimensions, int64_t **shapes, void *extra) { return shape; } \
  extern "C" int name##InferType(std::vector<int> types, void *extra) { return types[0]; }                           \
  extern "C" int name(int count, void **tensors, int *dimensions, int64_t **shapes, const char **dtypes, void *stream, \
                      void *extra)
#define ONE_NUMBER {1}
#define OF_FIRST_INPUT std::vector<int64_t>(shapes[0], shapes[0] + dimensions[0])

static int64_t elements_of(int dimensions, const int64_t *shape) {
  int64_t elements = 1;
  for (int i = 0; i < dimensions; i++) {
    elements *= shape[i];
  }
  return elements;
}

// In place of the total: total + part * factor
KERNEL(scaled_add_in_place, ONE_NUMBER) {
  if (count != 4 || elements_of(dimensions[0], shapes[0]) != 1 ||
      !std::equal(shapes[1], shapes[1] + dimensions[1], shapes[2], shapes[2] + dimensions[2])) {
    return 1;
  }
  const int64_t elements = elements_of(dimensions[1], shapes[1]);
  const float factor = *static_cast<const float *>(tensors[0]);
  float *total = static_cast<float *>(tensors[1]);
  const float *part = static_cast<const float *>(tensors[2]);
  for (int64_t i = 0; i < elements; i++) {
    total[i] += part[i] * factor;
  }
  *static_cast<float *>(tensors[3]) = 0;  // An operator must have a result.
  return 0;
}

// In place of each of many totals, which come before their parts: total + part * factor
KERNEL(add_all_in_place, ONE_NUMBER) {
  const int totals = count / 2 - 1;
  if (count % 2 != 0 || totals < 1) {
    return 1;
  }
  for (int i = 1; i <= totals; i++) {
    void *each[] = {tensors[0], tensors[i], tensors[i + totals], tensors[count - 1]};
    int its_dimensions[] = {dimensions[0], dimensions[i], dimensions[i + totals]};
    int64_t *its_shapes[] = {shapes[0], shapes[i], shapes[i + totals]};
    if (scaled_add_in_place(4, each, its_dimensions, its_shapes, dtypes, stream, extra) != 0) {
      return 1;
    }
  }
  return 0;
}

// Change a total, or many, by a number, which comes first.
template <typename Change>
static int change_in_place(int count, void **tensors, int *dimensions, int64_t **shapes, Change change) {
  if (count < 3 || elements_of(dimensions[0], shapes[0]) != 1) {
    return 1;
  }
  for (int i = 1; i < count - 1; i++) {
    float *total = static_cast<float *>(tensors[i]);
    change(total, total + elements_of(dimensions[i], shapes[i]), *static_cast<const float *>(tensors[0]));
  }
  *static_cast<float *>(tensors[count - 1]) = 0;
  return 0;
}

// In place of the total: total * factor
KERNEL(scaled_in_place, ONE_NUMBER) {
  return change_in_place(count, tensors, dimensions, shapes, [](float *begin, float *end, float factor) {
    for (float *each = begin; each != end; each++) {
      *each *= factor;
    }
  });
}

// In place of the total: a number, everywhere
KERNEL(filled_in_place, ONE_NUMBER) {
  return change_in_place(count, tensors, dimensions, shapes, std::fill<float *, float>);
}

// The sum of the squares: of sixteen lanes, and in double over blocks, so that many small ones are not lost. Vectors by
// hand, since g++ 12 keeps an array of lanes in memory and takes four times as long.
static double squares_of(const float *values, int64_t elements) {
  typedef float Four __attribute__((vector_size(4 * sizeof(float))));
  constexpr int64_t kLanes = 16, kBlock = 4096;
  double total = 0;
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, elements);
    Four a = {}, b = {}, c = {}, d = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      Four four[4];
      std::memcpy(four, values + i, sizeof(four));
      a += four[0] * four[0];
      b += four[1] * four[1];
      c += four[2] * four[2];
      d += four[3] * four[3];
    }
    for (; i < end; i++) {
      total += values[i] * values[i];
    }
    const Four sums = (a + b) + (c + d);
    total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  return total;
}

// Of one tensor or of many.
KERNEL(sum_of_squares, ONE_NUMBER) {
  double total = 0;
  for (int i = 0; i < count - 1; i++) {
    total += squares_of(static_cast<const float *>(tensors[i]), elements_of(dimensions[i], shapes[i]));
  }
  *static_cast<float *>(tensors[count - 1]) = static_cast<float>(total);
  return 0;
}

// The factor where the hash of a place, from 1 on, and a seed is at least as large as a bound, 0 elsewhere; in the shape
// of the first input. See replay_dropout.py, which does the same with operators.
static uint32_t hashed(uint32_t value) {
  value ^= value >> 16;
  value *= 0x7feb352du;
  value ^= value >> 15;
  value *= 0x846ca68bu;
  return value ^ (value >> 16);
}

KERNEL(replay_mask, OF_FIRST_INPUT) {
  if (count != 5) {
    return 1;
  }
  const int64_t elements = elements_of(dimensions[0], shapes[0]);
  const uint32_t seed = hashed(*static_cast<const uint32_t *>(tensors[1]));
  const uint32_t bound = *static_cast<const uint32_t *>(tensors[2]);
  const float factor = *static_cast<const float *>(tensors[3]);
  float *mask = static_cast<float *>(tensors[4]);
  for (int64_t i = 0; i < elements; i++) {
    mask[i] = (hashed(static_cast<uint32_t>(i + 1) ^ seed) & 0xffffffu) >= bound ? factor : 0.0f;
  }
  return 0;
}
