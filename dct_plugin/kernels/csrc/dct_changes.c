/* Changed entries of 16-bit weights, by bits (codecs/changes.py); included by dct_kernels.c. */

enum { CHANGES_MAGIC = 0xDC7B, CHANGES_PART = 64 };

/* The place of a float, given by its bits, in the order of the floats; and the bits of a place. */
static inline int16_t ordinal(uint16_t bits) { return (int16_t)(bits & 0x8000 ? bits ^ 0x7FFF : bits); }

/* A section of n codes, of so many bits each; the codes that do not fit are moved to the front. Returns their number. */
INLINE uint64_t write_section(int16_t *code, uint64_t n, int bits, uint8_t *out) {
    const int escape = -(1 << (bits - 1)), mask = (1 << bits) - 1;
    uint64_t rest = 0;
    for (uint64_t j = 0; j < n; out++) {
        unsigned byte = 0;
        for (int at = 0; at < 8 && j < n; at += bits, j++) {
            const int16_t e = code[j];
            const int fits = e > escape && e < -escape;
            byte |= (unsigned)((fits ? e : escape) & mask) << at;
            code[rest] = e;
            rest += !fits;
        }
        *out = (uint8_t)byte;
    }
    return rest;
}

/* Sections of n codes from one of so many bits on. */
static void write_differences(int16_t *code, uint64_t n, int bits, uint8_t *out) {
    for (; bits < 16; bits *= 2) {
        const uint64_t size = ceil_div(n * (uint64_t)bits, 8);
        n = bits == 2 ? write_section(code, n, 2, out)
          : bits == 4 ? write_section(code, n, 4, out)
                      : write_section(code, n, 8, out);
        out += size;
    }
    if (n) memcpy(out, code, 2 * n);
}

/* The record that turns held into wanted; out has room for HEADER + 2 * numel. sizes: {bytes, entries that differ}.
 * scratch: 6 bytes per entry. */
API int32_t dct_encode_changes(const uint16_t *wanted, const uint16_t *held, uint64_t numel, uint8_t *out,
                               void *scratch, uint64_t *sizes) {
    uint32_t *idx = scratch;
    int16_t *code = (int16_t *)(idx + numel);
    uint64_t nnz = 0, over2 = 0, over4 = 0, over8 = 0;
    for (uint64_t lo = 0; lo < numel; lo += CHANGES_PART) {
        const uint64_t n = numel - lo < CHANGES_PART ? numel - lo : CHANGES_PART;
        /* Written everywhere, and kept where an entry differs: no branch waits for memory. */
        int16_t found[CHANGES_PART];
        uint16_t any = 0;
        for (uint64_t i = 0; i < n; i++) {
            const uint16_t differs = wanted[lo + i] ^ held[lo + i];
            found[i] = (int16_t)(uint16_t)(ordinal(wanted[lo + i]) - ordinal(held[lo + i]));
            any |= differs;
        }
        if (!any) continue;
        for (uint64_t i = 0; i < n; i++) {
            idx[nnz] = (uint32_t)(lo + i);
            code[nnz] = (int16_t)(found[i] - (found[i] > 0));
            nnz += found[i] != 0;
        }
    }
    for (uint64_t j = 0; j < nnz; j++) {
        const int size = code[j] < 0 ? -(int)code[j] : code[j];
        over2 += size >= 2;
        over4 += size >= 8;
        over8 += size >= 128;
    }
    const uint64_t last = over8 * 2, from8 = over4 + last, from4 = ceil_div(over2, 2) + from8;
    const uint64_t values[] = {ceil_div(nnz, 4) + from4, ceil_div(nnz, 2) + from8, nnz + last, 2 * nnz};
    int first = 0;
    for (int c = 1; c < 4; c++)
        if (values[c] < values[first]) first = c;
    index_plan_t plan = plan_indices(idx, nnz, numel, ENC_AUTO);
    uint64_t nbytes = values[first];
    int bits = 2 << first;
    if (plan.nbytes + nbytes >= 2 * numel) {
        plan = (index_plan_t){ENC_DENSE, 0, 0};
        nbytes = 2 * numel;
        bits = 0;
        if (numel) memcpy(out + HEADER, wanted, nbytes);
    } else {
        encode_indices(idx, nnz, numel, plan, out + HEADER);
        write_differences(code, nnz, bits, out + HEADER + plan.nbytes);
    }
    store16(out, CHANGES_MAGIC);
    out[2] = 1;
    out[3] = (uint8_t)plan.encoding;
    out[4] = (uint8_t)bits;
    out[5] = (uint8_t)plan.param;
    store16(out + 6, 0);
    store32(out + 8, (uint32_t)numel);
    store32(out + 12, (uint32_t)nnz);
    store32(out + 16, (uint32_t)plan.nbytes);
    store32(out + 20, (uint32_t)nbytes);
    store64(out + 24, 0);
    sizes[0] = HEADER + plan.nbytes + nbytes;
    sizes[1] = nnz;
    uint32_t check1, check2;
    checksum(out, sizes[0], &check1, &check2);
    store32(out + 32, check1);
    store32(out + 36, check2);
    return OK;
}

/* Codes [n] from sections of nbytes; waiting: room for n numbers. */
static int read_differences(const uint8_t *p, uint64_t nbytes, uint64_t n, int bits, int16_t *code, uint32_t *waiting) {
    uint64_t count = n;
    for (uint64_t j = 0; j < n; j++) waiting[j] = (uint32_t)j;
    for (; bits < 16; bits *= 2) {
        const uint64_t size = ceil_div(count * (uint64_t)bits, 8), used = count * (uint64_t)bits % 8;
        const int half = 1 << (bits - 1), mask = 2 * half - 1;
        if (size > nbytes) return ERR_COUNT;
        if (used && p[size - 1] >> used) return ERR_TRAILING;
        uint64_t rest = 0;
        for (uint64_t j = 0; j < count; j++) {
            const uint64_t at = j * (uint64_t)bits;
            const int e = ((p[at / 8] >> at % 8 & mask) ^ half) - half;
            const uint32_t place = waiting[j];
            code[place] = (int16_t)e;
            waiting[rest] = place;
            rest += e == -half;
        }
        p += size;
        nbytes -= size;
        count = rest;
    }
    if (nbytes != 2 * count) return ERR_COUNT;
    for (uint64_t j = 0; j < count; j++) {
        code[waiting[j]] = (int16_t)load16(p + 2 * j);
        if (load16(p + 2 * j) == 0x7FFF) return ERR_VALUE;
    }
    return OK;
}

/* A record at p, of at most nbytes, for numel entries: its bytes; 0 if the header or a checksum is wrong. */
static uint64_t check_record(const uint8_t *p, uint64_t nbytes, uint64_t numel, int *status) {
    *status = ERR_HEADER;
    if (nbytes < HEADER || load16(p) != CHANGES_MAGIC || p[2] != 1 || load16(p + 6) || load64(p + 24)) return 0;
    const uint64_t nnz = load32(p + 12), index = load32(p + 16), values = load32(p + 20);
    const uint64_t size = HEADER + index + values;
    if (load32(p + 8) != numel || nnz > numel || size > nbytes) return 0;
    if (p[4] == 0) {
        if (p[3] || p[5] || index || values != 2 * numel) return 0;
    } else {
        const dct_payload_t section = {
            .numel = numel, .nnz = nnz, .index_nbytes = index, .encoding = p[3], .param = p[5]};
        if (p[4] != 2 && p[4] != 4 && p[4] != 8 && p[4] != 16) return 0;
        if (p[3] > ENC_RICE || !section_fits(&section)) return 0;
    }
    uint32_t check1, check2;
    checksum(p, size, &check1, &check2);
    if (check1 != load32(p + 32) || check2 != load32(p + 36)) {
        *status = ERR_CHECKSUM;
        return 0;
    }
    *status = OK;
    return size;
}

/* Apply the records of a message, one for each of count targets (numel entries each). Each target changes only if its
 * record is right, and none if a header or a checksum is wrong. scratch: 10 bytes per entry of the largest target. */
API int32_t dct_apply_changes(const uint8_t *message, uint64_t nbytes, uint16_t *const *targets, const uint64_t *numel,
                              int32_t count, void *scratch) {
    int status = OK;
    uint64_t at = 0, most = 0;
    for (int i = 0; i < count; i++) {
        const uint64_t size = check_record(message + at, nbytes - at, numel[i], &status);
        if (!size) return status;
        most = numel[i] > most ? numel[i] : most;
        at += size;
    }
    if (at != nbytes) return ERR_HEADER;
    uint32_t *idx = scratch, *waiting = idx + most;
    int16_t *code = (int16_t *)(waiting + most);
    for (int i = 0; i < count && status == OK; i++) {
        const uint8_t *p = message;
        const uint64_t nnz = load32(p + 12), index = load32(p + 16), values = load32(p + 20);
        uint16_t *out = targets[i];
        message += HEADER + index + values;
        if (p[4] == 0) {
            if (values) memcpy(out, p + HEADER, values);
            continue;
        }
        status = dct_decode_indices(p[3], p[5], p + HEADER, index, nnz, numel[i], idx);
        if (status == OK) status = read_differences(p + HEADER + index, values, nnz, p[4], code, waiting);
        for (uint64_t j = 0; j < nnz && status == OK; j++) {
            if (j + SCATTER_AHEAD < nnz) __builtin_prefetch(out + idx[j + SCATTER_AHEAD], 1);
            const int16_t place = (int16_t)(uint16_t)(ordinal(out[idx[j]]) + code[j] + (code[j] >= 0));
            out[idx[j]] = (uint16_t)ordinal((uint16_t)place);
        }
    }
    return status;
}
