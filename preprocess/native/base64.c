/* Base64 as nearly all clients send it: the standard alphabet and nothing else. */
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { CHARACTERS = 256 };
#define INVALID 0x80000000u

/* Where the six bits of the first to fourth character of a group lie in its three bytes, the first byte lowest. */
static uint32_t places[4][CHARACTERS];

__attribute__((constructor)) static void make_places(void) {
    const char *alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int n = 0; n < 4; n++)
        for (int c = 0; c < CHARACTERS; c++) places[n][c] = INVALID;
    for (uint32_t bits = 0; bits < 64; bits++) {
        const uint8_t c = (uint8_t)alphabet[bits];
        places[0][c] = bits << 2;
        places[1][c] = bits >> 4 | (bits & 15) << 12;
        places[2][c] = (bits >> 2) << 8 | (bits & 3) << 22;
        places[3][c] = bits << 16;
    }
}

#ifdef __AVX2__
enum { STEP = 8, BEYOND = 2 }; /* groups of a step, and those behind it that its last store may touch */

static inline __m256i between(__m256i c, char first, char last) {
    return _mm256_and_si256(_mm256_cmpgt_epi8(c, _mm256_set1_epi8(first - 1)),
                            _mm256_cmpgt_epi8(_mm256_set1_epi8(last + 1), c));
}

static inline __m256i shift(__m256i mask, char by) { return _mm256_and_si256(mask, _mm256_set1_epi8(by)); }

/* Eight groups; returns a mask of the characters that are in the alphabet. */
static inline __m256i decode_step(const uint8_t *text, uint8_t *out) {
    const __m256i c = _mm256_loadu_si256((const __m256i *)text);
    const __m256i upper = between(c, 'A', 'Z'), lower = between(c, 'a', 'z'), digit = between(c, '0', '9');
    const __m256i plus = _mm256_cmpeq_epi8(c, _mm256_set1_epi8('+'));
    const __m256i slash = _mm256_cmpeq_epi8(c, _mm256_set1_epi8('/'));
    const __m256i letters = _mm256_or_si256(shift(upper, -'A'), shift(lower, 26 - 'a'));
    const __m256i signs = _mm256_or_si256(shift(plus, 62 - '+'), shift(slash, 63 - '/'));
    const __m256i by = _mm256_or_si256(_mm256_or_si256(letters, signs), shift(digit, 52 - '0'));
    const __m256i six = _mm256_add_epi8(c, by);
    const __m256i twelve = _mm256_maddubs_epi16(six, _mm256_set1_epi16(0x0140));      /* the first times 64 */
    const __m256i group = _mm256_madd_epi16(twelve, _mm256_set1_epi32(0x00011000)); /* the first times 4096 */
    const __m256i order = _mm256_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1, /* -1: zero */
                                           2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8(group, order);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)(out + 12), _mm256_extracti128_si256(bytes, 1));
    return _mm256_or_si256(_mm256_or_si256(upper, lower), _mm256_or_si256(digit, _mm256_or_si256(plus, slash)));
}
#endif

/* text: `groups` times four characters. out: three bytes each. Returns 0, or 1 when a character is no base64. */
EXPORT int32_t decode_base64(const uint8_t *text, int64_t groups, uint8_t *out) {
    uint32_t seen = 0;
    int64_t i = 0;
#ifdef __AVX2__
    __m256i known = _mm256_set1_epi8(-1);
    for (; i + STEP + BEYOND <= groups; i += STEP, text += 4 * STEP, out += 3 * STEP)
        known = _mm256_and_si256(known, decode_step(text, out));
    if (_mm256_movemask_epi8(known) != -1) return 1;
#endif
    for (; i < groups; i++, text += 4, out += 3) {
        const uint32_t group =
            places[0][text[0]] | places[1][text[1]] | places[2][text[2]] | places[3][text[3]];
        seen |= group;
        out[0] = (uint8_t)group;
        out[1] = (uint8_t)(group >> 8);
        out[2] = (uint8_t)(group >> 16);
    }
    return (seen & INVALID) != 0;
}
