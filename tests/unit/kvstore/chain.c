/* Block names by the rule that kvstore/block.py opens with, written from that text alone: the second language of the
 * golden vectors. Only "sha256-128".
 *
 * Reads from standard input, one request a line, fields separated by blanks, "-" for an empty one:
 *     block_tokens salt tokens extras
 * salt: hexadecimal. tokens: decimal ids, separated by commas. extras: "block:bytes", hexadecimal, separated by commas.
 * Writes a line for each: the names of the full blocks in hexadecimal, separated by blanks.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 16, LINE_BYTES = 1 << 20 };

/* SHA-256, FIPS 180-4. */

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void compress(uint32_t state[8], const uint8_t chunk[64]) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)chunk[4 * i] << 24 | chunk[4 * i + 1] << 16 | chunk[4 * i + 2] << 8 | chunk[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
        uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + ROUND[i] + w[i];
        uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
        uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

static void sha256_128(const uint8_t *bytes, size_t length, uint8_t name[NAME_BYTES]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t last[128] = {0};
    size_t done = 0, rest, padded;
    for (; length - done >= 64; done += 64) compress(state, bytes + done);
    rest = length - done;
    memcpy(last, bytes + done, rest);
    last[rest] = 0x80;
    padded = rest < 56 ? 64 : 128;
    for (int i = 0; i < 8; i++) last[padded - 1 - i] = (uint8_t)((uint64_t)length * 8 >> 8 * i);
    for (size_t i = 0; i < padded; i += 64) compress(state, last + i);
    for (int i = 0; i < NAME_BYTES; i++) name[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

/* The chain. */

static size_t from_hex(const char *text, size_t digits, uint8_t *bytes) {
    for (size_t i = 0; i < digits / 2; i++) {
        unsigned value;
        if (sscanf(text + 2 * i, "%2x", &value) != 1) exit(2);
        bytes[i] = (uint8_t)value;
    }
    return digits / 2;
}

static size_t extras_of(const char *extras, unsigned long block, uint8_t *bytes) {
    while (*extras && *extras != '-') {
        char *colon;
        unsigned long of = strtoul(extras, &colon, 10);
        size_t digits = strcspn(colon + 1, ",");
        if (of == block) return from_hex(colon + 1, digits, bytes);
        extras = colon + 1 + digits;
        if (*extras == ',') extras++;
    }
    return 0;
}

static void print_chain(unsigned long block_tokens, const char *salt, const char *tokens, const char *extras) {
    static uint8_t content[LINE_BYTES];
    static const char ROOT[] = "fleet.chain.v1\0sha256-128"; /* with its final zero */
    uint8_t parent[NAME_BYTES];
    size_t length = sizeof ROOT;
    memcpy(content, ROOT, length);
    if (*salt != '-') length += from_hex(salt, strlen(salt), content + length);
    sha256_128(content, length, parent);

    unsigned long filled = 0, block = 0;
    const char *next = *tokens == '-' ? "" : tokens;
    while (*next) {
        char *end;
        unsigned long token = strtoul(next, &end, 10);
        for (int i = 0; i < 4; i++) content[NAME_BYTES + 4 * filled + i] = (uint8_t)(token >> 8 * i);
        next = *end == ',' ? end + 1 : end;
        if (++filled < block_tokens) continue;
        memcpy(content, parent, NAME_BYTES);
        length = NAME_BYTES + 4 * filled;
        length += extras_of(extras, block, content + length);
        sha256_128(content, length, parent);
        if (block++) putchar(' ');
        for (int i = 0; i < NAME_BYTES; i++) printf("%02x", parent[i]);
        filled = 0;
    }
    putchar('\n');
}

int main(void) {
    static char line[LINE_BYTES], salt[LINE_BYTES], tokens[LINE_BYTES], extras[LINE_BYTES];
    unsigned long block_tokens;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%lu %s %s %s", &block_tokens, salt, tokens, extras) != 4) return 2;
        print_chain(block_tokens, salt, tokens, extras);
    }
    return 0;
}
