/* Separable resampling of 8-bit images, first along the rows, then along the columns, in the fixed-point arithmetic
 * that Pillow defines: weights scaled by 2^22, sums in 32 bits, each pass rounded and clipped to a byte. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum { PRECISION_BITS = 22, ROUND = 1 << (PRECISION_BITS - 1), SLACK = 16 };

struct axis { /* mirrored in resampling.py */
    const int32_t *first, *count; /* [size]: the inputs that an output sums */
    const int32_t *weights;       /* [size][taps], zero from `count` on; taps is a multiple of 4 */
    int64_t size, taps;           /* taps 0: this axis stays as it is */
};

struct image { /* mirrored in resampling.py; rows without gaps */
    const uint8_t *pixels;
    int64_t height, width, channels; /* 1 or 3 */
    int64_t pixel_bytes; /* as many as channels; or four for three, when both axes change and rows come first */
};

INLINE uint8_t clip(int32_t sum) {
    sum >>= PRECISION_BITS;
    return sum < 0 ? 0 : sum > 255 ? 255 : sum;
}

/* Any number of channels, in plain C: what the vector code below must equal. */
INLINE void plain_row(const struct axis *axis, int64_t channels, const uint8_t *row, uint8_t *out) {
    for (int64_t x = 0; x < axis->size; x++)
        for (int64_t c = 0; c < channels; c++) {
            const uint8_t *p = row + axis->first[x] * channels + c;
            const int32_t *w = axis->weights + x * axis->taps;
            int32_t sum = ROUND;
            for (int64_t t = 0; t < axis->count[x]; t++) sum += p[t * channels] * w[t];
            out[x * channels + c] = clip(sum);
        }
}

INLINE void plain_rows(const uint8_t *const *rows, const int32_t *w, int64_t count, uint8_t *out, int64_t done,
                       int64_t bytes) {
    for (int64_t j = done; j < bytes; j++) {
        int32_t sum = ROUND;
        for (int64_t t = 0; t < count; t++) sum += rows[t][j] * w[t];
        out[j] = clip(sum);
    }
}

#ifdef __AVX2__
/* Sums of two products of 16-bit numbers are one instruction, of 32-bit ones many: a weight is taken as
 * high * 2^15 + low, the two are summed apart and joined at the end, exactly. */
enum { LOW_BITS = 15, LOW_MASK = (1 << LOW_BITS) - 1 };

INLINE __m256i join(__m256i high, __m256i low) {
    return _mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low);
}

/* Four weights become the low parts of the four, then the high parts. */
static void split_weights(const struct axis *axis, int16_t *split) {
    for (int64_t i = 0; i < axis->size * axis->taps; i++) {
        int16_t *group = split + i / 4 * 8 + i % 4;
        group[0] = axis->weights[i] & LOW_MASK;
        group[4] = axis->weights[i] >> LOW_BITS;
    }
}

/* Of three channels. Reads and writes a few bytes beyond the row. Of four taps, the lower half of the vectors has the
 * first two, the upper one the others; there the two values of a channel stand side by side as 16-bit numbers. */
INLINE void vector_row(const struct axis *axis, const int16_t *split, const uint8_t *row, uint8_t *out, int64_t taps) {
    const __m256i pairs = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, /* -1: zero */
                                           6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    const __m256i lows = _mm256_setr_epi32(0x03020100, 0x03020100, 0x03020100, 0, 0x07060504, 0x07060504, 0x07060504, 0);
    const __m256i highs = _mm256_add_epi8(lows, _mm256_set1_epi8(8));
    for (int64_t x = 0; x < axis->size; x++) {
        const uint8_t *p = row + 3 * (int64_t)axis->first[x];
        __m256i high = _mm256_setzero_si256(), low = _mm256_setr_epi32(ROUND, ROUND, ROUND, 0, 0, 0, 0, 0);
        for (int64_t t = 0; t < taps; t += 4, p += 12, split += 8) {
            const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
            const __m256i weights = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)split));
            const __m256i pixels = _mm256_shuffle_epi8(bytes, pairs);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(pixels, _mm256_shuffle_epi8(weights, lows)));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(pixels, _mm256_shuffle_epi8(weights, highs)));
        }
        const __m256i halves = join(high, low);
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        sum = _mm_srai_epi32(sum, PRECISION_BITS);
        sum = _mm_packs_epi32(sum, sum);
        _mm_storeu_si32(out + 3 * x, _mm_packus_epi16(sum, sum)); /* the fourth byte is the next pixel's */
    }
}

struct sums { /* of sixteen bytes, by halves */
    __m256i low[2], high[2];
};

INLINE void add_two_rows(struct sums *sums, const uint8_t *row, const uint8_t *other, __m256i low, __m256i high) {
    const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)row));
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)other));
    const __m256i pairs[2] = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        sums->low[n] = _mm256_add_epi32(sums->low[n], _mm256_madd_epi16(pairs[n], low));
        sums->high[n] = _mm256_add_epi32(sums->high[n], _mm256_madd_epi16(pairs[n], high));
    }
}

INLINE __m256i pair_weights(int32_t first, int32_t second) {
    return _mm256_set1_epi32((first & 0xffff) | (int32_t)((uint32_t)second << 16));
}

/* Sixteen bytes of the sum of `count` rows, as 16-bit numbers. */
INLINE __m256i sum_rows(const uint8_t *const *rows, const int32_t *w, int64_t count, int64_t j) {
    const __m256i zero = _mm256_setzero_si256(), round = _mm256_set1_epi32(ROUND);
    struct sums sums = {{round, round}, {zero, zero}};
    int64_t t = 0;
    for (; t + 2 <= count; t += 2)
        add_two_rows(&sums, rows[t] + j, rows[t + 1] + j, pair_weights(w[t] & LOW_MASK, w[t + 1] & LOW_MASK),
                     pair_weights(w[t] >> LOW_BITS, w[t + 1] >> LOW_BITS));
    if (t < count)
        add_two_rows(&sums, rows[t] + j, rows[t] + j, pair_weights(w[t] & LOW_MASK, 0),
                     pair_weights(w[t] >> LOW_BITS, 0));
    return _mm256_packs_epi32(_mm256_srai_epi32(join(sums.high[0], sums.low[0]), PRECISION_BITS),
                              _mm256_srai_epi32(join(sums.high[1], sums.low[1]), PRECISION_BITS));
}

/* Returns how many bytes it made. */
static int64_t vector_rows(const uint8_t *const *rows, const int32_t *w, int64_t count, uint8_t *out, int64_t bytes) {
    int64_t j = 0;
    for (; j + 32 <= bytes; j += 32) {
        const __m256i first = sum_rows(rows, w, count, j), second = sum_rows(rows, w, count, j + 16);
        const __m256i packed = _mm256_packus_epi16(first, second); /* by halves */
        _mm256_storeu_si256((__m256i *)(out + j), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    return j;
}
#endif

static void combine_rows(const uint8_t **rows, const int32_t *w, int64_t count, uint8_t *out, int64_t bytes) {
    int64_t done = 0;
#ifdef __AVX2__
    done = vector_rows(rows, w, count, out, bytes);
#endif
    plain_rows(rows, w, count, out, done, bytes);
}

struct scratch {
    uint8_t *padded;          /* one row of the input, with slack */
    uint8_t *ring;            /* rows resampled along the row, row y at y % capacity */
    const uint8_t **sources;  /* the rows that one output sums */
    int16_t *split;           /* the row's weights for the vector code */
    int64_t capacity, stride, next;
};

static void resample_row(const struct axis *axis, int64_t channels, const struct scratch *s, uint8_t *out) {
#ifdef __AVX2__
    if (channels == 3) {
        if (axis->taps == 4) vector_row(axis, s->split, s->padded, out, 4);
        else vector_row(axis, s->split, s->padded, out, axis->taps);
        return;
    }
#endif
    if (channels == 1) plain_row(axis, 1, s->padded, out);
    else plain_row(axis, 3, s->padded, out);
}

/* Leaves out every fourth byte. Writes a few bytes beyond the row. */
static void drop_fourth(const uint8_t *from, int64_t pixels, uint8_t *to) {
    int64_t x = 0;
#ifdef __AVX2__
    const __m256i kept = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1, /* -1: zero */
                                          0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    for (; x + 8 <= pixels; x += 8) {
        const __m256i eight = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)(from + 4 * x)), kept);
        _mm_storeu_si128((__m128i *)(to + 3 * x), _mm256_castsi256_si128(eight));
        _mm_storeu_si128((__m128i *)(to + 3 * x + 12), _mm256_extracti128_si256(eight, 1));
    }
#endif
    for (; x < pixels; x++) memcpy(to + 3 * x, from + 4 * x, 3);
}

static const uint8_t *row_at(const struct image *image, const struct axis *across, struct scratch *s, int64_t y) {
    const int64_t bytes = image->width * image->channels;
    if (!across->taps) return image->pixels + y * bytes;
    for (; s->next <= y; s->next++) {
        if (image->pixel_bytes == image->channels) memcpy(s->padded, image->pixels + s->next * bytes, bytes);
        else drop_fourth(image->pixels + s->next * image->width * image->pixel_bytes, image->width, s->padded);
        resample_row(across, image->channels, s, s->ring + s->next % s->capacity * s->stride);
    }
    return s->ring + y % s->capacity * s->stride;
}

static void across_first(const struct image *image, const struct axis *across, const struct axis *down,
                         struct scratch *s, uint8_t *out) {
    const int64_t bytes = (across->taps ? across->size : image->width) * image->channels;
    for (int64_t y = 0; y < (down->taps ? down->size : image->height); y++) {
        if (!down->taps) {
            memcpy(out + y * bytes, row_at(image, across, s, y), bytes);
            continue;
        }
        if (s->next < down->first[y]) s->next = down->first[y]; /* rows that no output sums */
        for (int64_t t = 0; t < down->count[y]; t++) s->sources[t] = row_at(image, across, s, down->first[y] + t);
        combine_rows(s->sources, down->weights + y * down->taps, down->count[y], out + y * bytes, bytes);
    }
}

static void down_first(const struct image *image, const struct axis *across, const struct axis *down,
                       struct scratch *s, uint8_t *out) {
    const int64_t bytes = image->width * image->channels, out_bytes = across->size * image->channels;
    for (int64_t y = 0; y < down->size; y++) {
        for (int64_t t = 0; t < down->count[y]; t++) s->sources[t] = image->pixels + (down->first[y] + t) * bytes;
        combine_rows(s->sources, down->weights + y * down->taps, down->count[y], s->padded, bytes);
        resample_row(across, image->channels, s, s->ring);
        memcpy(out + y * out_bytes, s->ring, out_bytes);
    }
}

/* out: [down's size or height][across's size or width][channels]. The order of the passes shows in the last bit.
 * Returns 0, or 1 when out of memory. */
EXPORT int32_t resample(const struct image *image, const struct axis *across, const struct axis *down,
                        int32_t columns_first, uint8_t *out) {
    struct scratch s = {.capacity = down->taps ? down->taps : 1};
    s.stride = (across->taps ? across->size : image->width) * image->channels + SLACK;
    s.padded = calloc((image->width + across->taps) * image->channels + SLACK, 1);
    s.ring = malloc(s.capacity * s.stride);
    s.sources = malloc(s.capacity * sizeof *s.sources);
    s.split = malloc(across->size * across->taps * 2 * sizeof *s.split + SLACK);
    const int failed = !s.padded || !s.ring || !s.sources || !s.split;
    if (!failed) {
#ifdef __AVX2__
        split_weights(across, s.split);
#endif
        if (columns_first && across->taps && down->taps) down_first(image, across, down, &s, out);
        else across_first(image, across, down, &s, out);
    }
    free(s.padded);
    free(s.ring);
    free(s.sources);
    free(s.split);
    return failed;
}
