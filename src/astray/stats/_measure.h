// The interface of the kernels for other native parts.

#ifndef ASTRAY_MEASURE_H
#define ASTRAY_MEASURE_H

#include <Python.h>
#include <stdint.h>

// The measurement of a tensor: the fields of `astray.records.Statistics` in their order, and the fingerprint.
typedef struct Measurement {
    double moments[6];  // NaN when no element is finite
    int64_t counts[4];
    int64_t first_bad;  // −1 when all elements are finite
    double first_bad_value;
    uint64_t fingerprint;
} Measurement;

enum { kNanCount = 1, kInfCount = 2 };  // among the counts

#define KERNELS "astray.stats._native"
#define MEASURING KERNELS ".measuring"  // the name of the capsule that holds a `Measuring`

typedef struct Measuring {
    // The number of the dtype of this name; −1 when the kernels do not know it.
    int (*dtype)(const char *name);
    // Measures memory of this process; without `statistics` only the fingerprint. Releases the GIL when there is much
    // to read. −1 with an error set.
    int (*measure)(uint64_t address, int dtype, const int64_t *shape, const int64_t *stride, int rank, int statistics,
                   Measurement *out);
} Measuring;

#endif
