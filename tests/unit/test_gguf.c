/* tests/unit/test_gguf.c: the GGUF reader on files in memory: right ones, one row per wrong one.
 *
 * Every wrong file is the right one with one thing changed, and the row names a piece of the
 * sentence that must come out. Buffers have the exact size, so that the address sanitizer sees a
 * read of one byte too many.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "proto/gguf.h"
#include "proto/limits.h"
#include "tests/unit/gguf_writer.h"

/* Little-endian literals. */
#define N4(b)      b "\0\0\0"
#define N8(b)      b "\0\0\0\0\0\0\0"
#define RAW(s)     (s), sizeof(s) - 1
#define RAW_KV(s)  .kv = (s), .kv_bytes = sizeof(s) - 1
#define NAME_64    "0123456789012345678901234567890123456789012345678901234567890123"
#define BIG(shift) (1ull << (shift))

/* The right file: three keys, two tensors (a: F32 [4], b: Q8_0 [32, 2]), unless told. */
struct spec {
    const char *magic;           /* NULL: GGUF */
    uint32_t version;            /* 0: 3 */
    uint64_t n_tensors, n_kv;    /* 0: as many as are written */
    const char *kv;              /* one more key, already encoded */
    size_t kv_bytes;
    const char *name;            /* one more tensor */
    size_t name_bytes;           /* 0: strlen(name) */
    uint32_t n_dims, type;
    uint64_t ne[5];
    uint64_t offset;             /* of it; 0: right after b */
    uint64_t offset_b;           /* 0: the right one */
    size_t cut;                  /* bytes missing at the end */
    const char *tail;            /* bytes after the end */
    size_t tail_bytes;
};

static void put_keys(struct bytes *b, const struct spec *s) {
    put_key(b, "general.architecture", GGUF_STRING);
    put_str(b, "glm-dsa");
    put_key(b, "a.count", GGUF_U32);
    put_u32(b, 7);
    put_key(b, "a.words", GGUF_ARRAY);
    put_u32(b, GGUF_STRING);
    put_u64(b, 3);
    put_str(b, "one");
    put_str(b, "");
    put_str(b, "three");
    if (s->kv) put(b, s->kv, s->kv_bytes);
}

static void put_tensors(struct bytes *b, const struct spec *s) {
    put_tensor(b, "a", 1, (uint64_t[]){4}, 0, 0);
    put_tensor(b, "b", 2, (uint64_t[]){32, 2}, 8, s->offset_b ? s->offset_b : 32);
    if (!s->name) return;
    put_strn(b, s->name, s->name_bytes ? s->name_bytes : strlen(s->name));
    put_u32(b, s->n_dims);
    for (uint32_t d = 0; d < s->n_dims && d < 5; d++) put_u64(b, s->ne[d]);
    put_u32(b, s->type);
    put_u64(b, s->offset ? s->offset : 128);
}

static struct bytes build(const struct spec *s) {
    struct bytes b = {0};
    put_header(&b, s->version ? s->version : 3, s->n_tensors ? s->n_tensors : 2u + !!s->name,
               s->n_kv ? s->n_kv : 3u + !!s->kv);
    if (s->magic) memcpy(b.p, s->magic, 4);
    put_keys(&b, s);
    put_tensors(&b, s);
    put_padding(&b, 32);
    put_fill(&b, 128 + (s->name ? 64 : 0), 0x5a);
    b.n -= s->cut;
    if (s->tail) put(&b, s->tail, s->tail_bytes);
    b.p = realloc(b.p, b.n ? b.n : 1);
    return b;
}

static int parse(struct gguf **g, const struct spec *s, struct bytes *b, struct err_text *err) {
    *b = build(s);
    err->text[0] = 0;
    return gguf_parse(g, b->p, b->n, "f.gguf", err);
}

/* ---- right files ---- */

static void a_right_file_gives_its_keys_and_tensors(void **state) {
    UNUSED(state);
    for (uint32_t version = 2; version <= 3; version++) {
        struct bytes b;
        struct gguf *g;
        struct err_text err;
        struct spec s = {.version = version};
        int rc = parse(&g, &s, &b, &err);
        if (rc) fail_msg("expected ok, found %s", err.text);
        assert_int_equal(gguf_n_kv(g), 3);
        assert_int_equal(gguf_n_tensors(g), 2);
        assert_int_equal(gguf_parts(g), 1);
        assert_int_equal(gguf_part_fd(g, 0), -1);
        assert_string_equal(gguf_part_path(g, 0), "f.gguf");
        assert_int_equal(gguf_total_bytes(g), 16 + 68);
        const struct gguf_tensor *t = gguf_tensor_find(g, "b");
        assert_non_null(t);
        assert_ptr_equal(t, gguf_tensor_at(g, 1));
        assert_int_equal(t->n_dims, 2);
        assert_int_equal(t->ne[0], 32);
        assert_int_equal(t->ne[1], 2);
        assert_int_equal(t->ne[3], 1);
        assert_int_equal(t->row_bytes, 34);
        assert_int_equal(t->bytes, 68);
        assert_int_equal(t->offset % 32, 0);
        assert_ptr_equal(t->data, b.p + t->offset);
        assert_null(gguf_tensor_find(g, "c"));
        assert_null(gguf_tensor_find(g, ""));
        gguf_close(g);
        free(b.p);
    }
}

static void strings_of_an_array_are_walked_in_place(void **state) {
    UNUSED(state);
    struct bytes b;
    struct gguf *g;
    struct err_text err;
    assert_int_equal(parse(&g, &(struct spec){0}, &b, &err), OK);
    const struct gguf_kv *kv = gguf_find(g, "a.words");
    assert_non_null(kv);
    assert_int_equal(kv->count, 3);
    static const char *const want[] = {"one", "", "three"};
    struct gguf_cursor c = {0};
    struct gguf_str s;
    for (int i = 0; i < 3; i++) {
        assert_true(gguf_next_str(kv, &c, &s));
        assert_int_equal(s.n, strlen(want[i]));
        assert_memory_equal(s.p, want[i], s.n);
        assert_true((const uint8_t *)s.p >= b.p && (const uint8_t *)s.p <= b.p + b.n);
    }
    assert_false(gguf_next_str(kv, &c, &s));
    c = (struct gguf_cursor){.at = UINT64_MAX - 3}; /* not a place of this array */
    assert_false(gguf_next_str(kv, &c, &s));
    assert_false(gguf_next_str(gguf_find(g, "a.count"), &(struct gguf_cursor){0}, &s));
    gguf_close(g);
    free(b.p);
}

/* One key of each type, read as each kind: "u" u64, "f" f64, "b" bool, "s" string may be read. */
static const struct {
    const char *key, *reads, *value;
    size_t value_bytes;
    uint32_t type;
    double number;
} values[] = {
    {"u8", "u", RAW("\xc8"), GGUF_U8, 200},
    {"i8", "u", RAW("\x64"), GGUF_I8, 100},
    {"i8-", "", RAW("\xff"), GGUF_I8, -1},
    {"u16", "u", RAW("\x10\x27"), GGUF_U16, 10000},
    {"i16", "u", RAW("\x10\x27"), GGUF_I16, 10000},
    {"i16-", "", RAW("\xf0\xd8"), GGUF_I16, -10000},
    {"u32", "u", RAW("\xff\xff\xff\xff"), GGUF_U32, 4294967295.0},
    {"i32", "u", RAW("\xff\xff\xff\x7f"), GGUF_I32, 2147483647},
    {"i32-", "", RAW("\xff\xff\xff\xff"), GGUF_I32, -1},
    {"u64", "u", RAW("\0\0\0\0\0\0\1\0"), GGUF_U64, 281474976710656.0},
    {"i64", "u", RAW("\0\0\0\0\0\0\1\0"), GGUF_I64, 281474976710656.0},
    {"i64-", "", RAW("\0\0\0\0\0\0\0\x80"), GGUF_I64, -9223372036854775808.0},
    {"f32", "f", RAW("\0\0\xc0\x3f"), GGUF_F32, 1.5},
    {"f64", "f", RAW("\0\0\0\0\0\0\xf8\x3f"), GGUF_F64, 1.5},
    {"bool", "b", RAW("\1"), GGUF_BOOL, 1},
    {"string", "s", RAW(N8("\2") "hi"), GGUF_STRING, 0},
    {"array", "", RAW(N4("\4") N8("\1") N4("\1")), GGUF_ARRAY, 0},
};

static void a_value_is_read_by_kind_whatever_its_width(void **state) {
    UNUSED(state);
    struct bytes b = {0};
    struct gguf *g;
    struct err_text err = {{0}};
    put_header(&b, 3, 0, ARRAY_LEN(values));
    for (size_t i = 0; i < ARRAY_LEN(values); i++) {
        put_key(&b, values[i].key, values[i].type);
        put(&b, values[i].value, values[i].value_bytes);
    }
    if (gguf_parse(&g, b.p, b.n, "f.gguf", &err)) fail_msg("expected ok, found %s", err.text);
    for (size_t i = 0; i < ARRAY_LEN(values); i++) {
        const char *key = values[i].key, *reads = values[i].reads;
        uint64_t u = 0;
        double f = 0;
        bool flag = false;
        struct gguf_str s;
        print_message("  %s\n", key);
        assert_int_equal(gguf_get_u64(g, key, &u, &err), strchr(reads, 'u') ? OK : ERR_FORMAT);
        if (!strchr(reads, 'u')) assert_non_null(strstr(err.text, "expected an integer"));
        assert_int_equal(gguf_get_f64(g, key, &f, &err), strchr(reads, 'f') ? OK : ERR_FORMAT);
        assert_int_equal(gguf_get_bool(g, key, &flag, &err), strchr(reads, 'b') ? OK : ERR_FORMAT);
        assert_int_equal(gguf_get_str(g, key, &s, &err), strchr(reads, 's') ? OK : ERR_FORMAT);
        if (*reads == 'u') assert_true((double)u == values[i].number);
        if (*reads == 'f') assert_true(f == values[i].number);
        if (*reads == 'b') assert_true(flag);
        if (*reads == 's') assert_memory_equal(s.p, "hi", s.n);
    }
    snprintf(err.text, sizeof err.text, "untouched");
    uint64_t u;
    assert_int_equal(gguf_get_u64(g, "absent", &u, &err), ERR_NOT_FOUND);
    assert_string_equal(err.text, "untouched");
    gguf_close(g);
    free(b.p);
}

static void an_array_of_numbers_is_read_by_index(void **state) {
    UNUSED(state);
    static const struct spec rows[] = {
        {.kv = N8("\1") "k" N4("\x9") N4("\1") N8("\2") "\5\xfe", .kv_bytes = 27},     /* i8 */
        {.kv = N8("\1") "k" N4("\x9") N4("\3") N8("\2") "\5\0\xfe\xff", .kv_bytes = 29}, /* i16 */
        {.kv = N8("\1") "k" N4("\x9") N4("\5") N8("\2") "\5\0\0\0\xfe\xff\xff\xff", .kv_bytes = 33},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct bytes b;
        struct gguf *g;
        struct err_text err;
        int64_t v;
        if (parse(&g, &rows[i], &b, &err)) fail_msg("row %zu: expected ok, found %s", i, err.text);
        const struct gguf_kv *kv = gguf_find(g, "k");
        assert_int_equal(gguf_array_i64(kv, 0, &v), OK);
        assert_int_equal(v, 5);
        assert_int_equal(gguf_array_i64(kv, 1, &v), OK);
        assert_int_equal(v, -2);
        assert_int_equal(gguf_array_i64(kv, 2, &v), ERR_RANGE);
        assert_int_equal(gguf_array_i64(gguf_find(g, "a.words"), 0, &v), ERR_FORMAT);
        assert_int_equal(gguf_array_i64(gguf_find(g, "a.count"), 0, &v), ERR_FORMAT);
        gguf_close(g);
        free(b.p);
    }
}

static void every_storable_type_has_the_size_of_the_format(void **state) {
    UNUSED(state);
    static const uint16_t want[][3] = {
        {0, 1, 4},     {1, 1, 2},     {2, 32, 18},   {3, 32, 20},   {6, 32, 22},   {7, 32, 24},
        {8, 32, 34},   {10, 256, 84}, {11, 256, 110}, {12, 256, 144}, {13, 256, 176},
        {14, 256, 210}, {16, 256, 66}, {17, 256, 74}, {18, 256, 98}, {19, 256, 50}, {20, 32, 18},
        {21, 256, 110}, {22, 256, 82}, {23, 256, 136}, {24, 1, 1},   {25, 1, 2},    {26, 1, 4},
        {27, 1, 8},    {28, 1, 8},    {29, 256, 56}, {30, 1, 2},    {34, 256, 54}, {35, 256, 66},
        {39, 32, 17},  {40, 64, 36},  {41, 128, 18}, {42, 64, 18},
    };
    size_t at = 0;
    for (uint32_t id = 0; id < 300; id++) {
        const struct gguf_type_info *info = gguf_type_info(id);
        if (at < ARRAY_LEN(want) && want[at][0] == id) {
            assert_non_null(info);
            assert_int_equal(info->block_elems, want[at][1]);
            assert_int_equal(info->block_bytes, want[at][2]);
            at++;
        } else {
            assert_null(info);
        }
    }
    assert_int_equal(at, ARRAY_LEN(want));
    assert_null(gguf_type_info(UINT32_MAX));
}

static void the_last_tensor_may_lack_its_padding(void **state) {
    UNUSED(state);
    struct bytes b;
    struct gguf *g;
    struct err_text err;
    assert_int_equal(parse(&g, &(struct spec){.cut = 28}, &b, &err), OK);
    gguf_close(g);
    free(b.p);
}

static void an_alignment_of_its_own_is_obeyed(void **state) {
    UNUSED(state);
    struct bytes b = {0};
    struct gguf *g;
    struct err_text err = {{0}};
    put_header(&b, 3, 2, 1);
    put_key(&b, "general.alignment", GGUF_U32);
    put_u32(&b, 4096);
    put_tensor(&b, "a", 1, (uint64_t[]){4}, 0, 0);
    put_tensor(&b, "b", 1, (uint64_t[]){4}, 0, 4096);
    put_padding(&b, 4096);
    put_fill(&b, 4096 + 16, 1);
    if (gguf_parse(&g, b.p, b.n, "f.gguf", &err)) fail_msg("expected ok, found %s", err.text);
    assert_int_equal(gguf_tensor_find(g, "a")->offset, 4096);
    assert_int_equal(gguf_tensor_find(g, "b")->offset, 8192);
    gguf_close(g);
    free(b.p);
}

/* ---- wrong files ---- */

static const struct {
    const char *name, *expect;
    struct spec s;
} wrong[] = {
    {"1 wrong magic", "expected a GGUF file, found one that starts with 'GGML'", {.magic = "GGML"}},
    {"1 magic of control bytes", "starts with '?", {.magic = "\1\2\3\4"}},
    {"2 version 1", "expected GGUF version 2 or 3, found 1", {.version = 1}},
    {"2 version 4", "expected GGUF version 2 or 3, found 4", {.version = 4}},
    {"2 byte-swapped", "big-endian", {.version = 3u << 24}},
    {"3 negative tensor count", "expected a count of tensors, found -1", {.n_tensors = UINT64_MAX}},
    {"3 negative key count", "expected a count of keys, found -2", {.n_kv = UINT64_MAX - 1}},
    {"3 tensor count 2^61", "tensors in the", {.n_tensors = BIG(61)}},
    {"3 tensor count 2^63-1", "tensors in the", {.n_tensors = INT64_MAX}},
    {"3 key count 2^61", "keys in the", {.n_kv = BIG(61)}},
    {"3 key count a little too large", "keys in the", {.n_kv = 40}},
    {"3 one tensor too many", "tensor 2: expected", {.n_tensors = 3}},
    {"3 one key too many", "tensor 0: expected", {.n_kv = 4}},
    {"4 data cut", "tensor 'b': expected 68 bytes of data at offset", {.cut = 29}},
    {"4 data gone", "tensor 'a': expected 16 bytes of data", {.cut = 128}},
    {"4 padding cut", "expected the tensor data at offset", {.cut = 129}},
    {"5 key length 2^64-1", "key 3: expected 18446744073709551615 bytes",
     {RAW_KV("\xff\xff\xff\xff\xff\xff\xff\xff" "k")}},
    {"6 empty key", "expected a key, found an empty one", {RAW_KV(N8("\0") N4("\7") "\1")}},
    {"6 duplicate key", "key 'a.count': expected every key once",
     {RAW_KV(N8("\7") "a.count" N4("\7") "\1")}},
    {"6 key with NUL", "expected a key of printable bytes, found byte 0x00 in 'a?b'",
     {RAW_KV(N8("\3") "a\0b" N4("\7") "\1")}},
    {"6 key with newline", "found byte 0x0a", {RAW_KV(N8("\3") "a\nb" N4("\7") "\1")}},
    {"7 value type 13", "key 'k': expected a value type from 0 to 12, found 13",
     {RAW_KV(N8("\1") "k" N4("\xd") "\1")}},
    {"7 value type -1", "found 4294967295", {RAW_KV(N8("\1") "k" "\xff\xff\xff\xff" "\1")}},
    {"7 bool of 2", "key 'k': expected a bool of 0 or 1, found 2",
     {RAW_KV(N8("\1") "k" N4("\7") "\2")}},
    {"7 bool of 255 in an array", "expected a bool of 0 or 1, found 255",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\7") N8("\2") "\1\xff")}},
    {"8 array of arrays",
     "key 'k': expected an array of a simple type, found one of type 9 (array)",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\x9") N8("\1") N4("\0") N8("\0"))}},
    {"8 unknown element type", "found one of type 13 (unknown)",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\xd") N8("\1") "\1")}},
    {"8 array of 2^63 elements",
     "key 'k': expected a count of array elements, found -9223372036854775808",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\0") "\0\0\0\0\0\0\0\x80")}},
    {"8 array of 2^61 u64", "array elements in the",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\xa") "\0\0\0\0\0\0\0\x20")}},
    {"8 more strings than bytes", "array elements in the",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\x8") "\0\0\1\0\0\0\0\0")}},
    {"8 a string of the array leaves the file", "key 'k': expected 4294967295 bytes",
     {RAW_KV(N8("\1") "k" N4("\x9") N4("\x8") N8("\1") "\xff\xff\xff\xff\0\0\0\0")}},
    {"5 string length 2^64-1", "key 'k': expected 18446744073709551615 bytes",
     {RAW_KV(N8("\1") "k" N4("\x8") "\xff\xff\xff\xff\xff\xff\xff\xff")}},
    {"9 alignment is a u64", "key 'general.alignment': expected a u32, found u64",
     {RAW_KV(N8("\x11") "general.alignment" N4("\xa") N8("\x20"))}},
    {"9 alignment is a string", "expected a u32, found string",
     {RAW_KV(N8("\x11") "general.alignment" N4("\x8") N8("\2") "32")}},
    {"9 alignment 0", "expected a power of two from 8 to 1048576, found 0",
     {RAW_KV(N8("\x11") "general.alignment" N4("\4") N4("\0"))}},
    {"9 alignment 48", "found 48", {RAW_KV(N8("\x11") "general.alignment" N4("\4") N4("\x30"))}},
    {"9 alignment 2^31", "found 2147483648",
     {RAW_KV(N8("\x11") "general.alignment" N4("\4") "\0\0\0\x80")}},
    {"10 name of 64 bytes", "tensor 2: expected a string of at most 63 bytes, found 64",
     {.name = NAME_64, .n_dims = 1, .ne = {4}}},
    {"10 empty name", "expected a tensor name, found an empty one",
     {.name = "", .n_dims = 1, .ne = {4}}},
    {"10 name with NUL", "found byte 0x00 in 'a?b'",
     {.name = "a\0b", .name_bytes = 3, .n_dims = 1, .ne = {4}}},
    {"10 duplicate name", "tensor 'a': expected every tensor once",
     {.name = "a", .n_dims = 1, .ne = {4}}},
    {"11 no dimensions", "tensor 'c': expected 1 to 4 dimensions, found 0", {.name = "c"}},
    {"11 five dimensions", "expected 1 to 4 dimensions, found 5",
     {.name = "c", .n_dims = 5, .ne = {1, 1, 1, 1, 1}}},
    {"11 2^32-1 dimensions", "found 4294967295", {.name = "c", .n_dims = UINT32_MAX}},
    {"12 dimension 0", "tensor 'c': expected dimension 1 of at least 1, found 0",
     {.name = "c", .n_dims = 2, .ne = {4, 0}}},
    {"12 dimension -1", "found -1", {.name = "c", .n_dims = 2, .ne = {4, UINT64_MAX}}},
    {"12 element product wraps", "expected fewer than 2^63 elements",
     {.name = "c", .n_dims = 3, .ne = {BIG(22), BIG(42) + 1, BIG(22)}}},
    {"12 element product is 2^63", "expected fewer than 2^63 elements",
     {.name = "c", .n_dims = 2, .ne = {BIG(32), BIG(31)}}},
    {"12 row bytes wrap", "tensor 'c': expected fewer than 2^63 bytes",
     {.name = "c", .n_dims = 1, .ne = {BIG(62)}}},
    {"12 total bytes wrap", "expected fewer than 2^63 bytes",
     {.name = "c", .n_dims = 2, .type = 28, .ne = {BIG(31), BIG(31)}}},
    {"13 runtime type Q8_1",
     "tensor 'c': expected a tensor type that can be stored, found id 9 (a working format",
     {.name = "c", .n_dims = 1, .type = 9, .ne = {32}}},
    {"13 runtime type Q8_K",
     "found id 15 (a working format", {.name = "c", .n_dims = 1, .type = 15, .ne = {256}}},
    {"13 removed type 4",
     "found id 4 (a type removed", {.name = "c", .n_dims = 1, .type = 4, .ne = {32}}},
    {"13 removed type 38",
     "found id 38 (a type removed", {.name = "c", .n_dims = 1, .type = 38, .ne = {32}}},
    {"13 private type 138",
     "found id 138 (a private type", {.name = "c", .n_dims = 1, .type = 138, .ne = {256}}},
    {"13 type 43",
     "found id 43 (an unknown type", {.name = "c", .n_dims = 1, .type = 43, .ne = {256}}},
    {"13 type -1",
     "found id -1 (an unknown type", {.name = "c", .n_dims = 1, .type = UINT32_MAX, .ne = {256}}},
    {"14 rows of half a block",
     "tensor 'c': expected rows of a multiple of 256 elements (Q4_K), found 384",
     {.name = "c", .n_dims = 1, .type = 12, .ne = {384}}},
    {"15 offset off the alignment",
     "tensor 'b': expected an offset that is a multiple of 32, found 33",
     {.offset_b = 33}},
    {"15 gap",
     "tensor 'b': expected offset 32, right after the tensor before it, found 64",
     {.offset_b = 64}},
    {"15 overlap",
     "tensor 'c': expected offset 128", {.name = "c", .n_dims = 1, .ne = {4}, .offset = 32}},
    {"15 offset wraps", "tensor 'b': expected offset 32", {.offset_b = UINT64_MAX - 31}},
    {"15 tensor passes the end", "tensor 'c': expected 400 bytes of data at offset",
     {.name = "c", .n_dims = 1, .ne = {100}}},
    {"15 tensor of an exabyte", "tensor 'c': expected 1152921504606846976 bytes of data",
     {.name = "c", .n_dims = 1, .ne = {BIG(58)}}},
    {"19 split.count 0", "key 'split.count': expected 1 to 99999, found 0",
     {RAW_KV(N8("\xb") "split.count" N4("\2") "\0\0")}},
    {"19 split.count 100000", "key 'split.count': expected 1 to 99999, found 100000",
     {RAW_KV(N8("\xb") "split.count" N4("\4") "\xa0\x86\1\0")}},
    {"19 split.count is a string", "key 'split.count': expected an integer",
     {RAW_KV(N8("\xb") "split.count" N4("\x8") N8("\1") "2")}},
    {"17 part number missing", "key 'split.no': expected it in a part of 2",
     {RAW_KV(N8("\xb") "split.count" N4("\2") "\2\0")}},
    {"joined with cat", "were parts joined with cat?",
     {.tail = "GGUF\3\0\0\0" N8("\0") N8("\0"), .tail_bytes = 24}},
    {"joined with cat, no padding between", "were parts joined with cat?",
     {.cut = 28, .tail = "GGUF\3\0\0\0" N8("\0") N8("\0"), .tail_bytes = 24}},
};

/* The largest piece of memory asked for: the linker sends the calls here. */
static size_t asked_most;

void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__wrap_malloc(size_t);
void *__wrap_calloc(size_t, size_t);
void *__wrap_realloc(void *, size_t);

void *__wrap_malloc(size_t n) {
    asked_most = MAX(asked_most, n);
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t each) {
    size_t bytes = 0;
    asked_most = __builtin_mul_overflow(n, each, &bytes) ? SIZE_MAX : MAX(asked_most, bytes);
    return __real_calloc(n, each);
}

void *__wrap_realloc(void *p, size_t n) {
    asked_most = MAX(asked_most, n);
    return __real_realloc(p, n);
}

/* What a refusal may have asked for: a table of as many records as the bytes could hold. */
static size_t fair_bytes(const struct bytes *b) {
    return 8 * b->n + 4096;
}

static void a_wrong_file_is_refused_with_what_was_expected_and_found(void **state) {
    UNUSED(state);
    int failures = 0;
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        struct bytes b;
        struct gguf *g = NULL;
        struct err_text err;
        asked_most = 0;
        int rc = parse(&g, &wrong[i].s, &b, &err);
        if (asked_most > fair_bytes(&b))
            fail_msg("%s: expected to be asked for at most %zu bytes, found %zu", wrong[i].name,
                     fair_bytes(&b), asked_most);
        bool good = rc < 0 && strstr(err.text, wrong[i].expect) &&
                    !strncmp(err.text, "f.gguf: ", 8);
        if (!good) {
            print_error("%s\n  expected: %s\n  found:    %s\n", wrong[i].name, wrong[i].expect,
                        rc < 0 ? err.text : "ok");
            failures++;
        }
        if (rc == OK) gguf_close(g);
        free(b.p);
    }
    assert_int_equal(failures, 0);
}

/* There are bytes enough for that many, so that it is the limit which speaks. */
static void more_keys_or_tensors_than_the_limit_are_refused(void **state) {
    UNUSED(state);
    struct bytes b = {0};
    struct gguf *g;
    struct err_text err;
    put_header(&b, 3, 0, LIMIT_GGUF_KEYS + 1);
    put_fill(&b, 40 * (LIMIT_GGUF_TENSORS + 1), 0);
    assert_int_equal(gguf_parse(&g, b.p, b.n, "f.gguf", &err), ERR_LIMIT);
    assert_non_null(strstr(err.text, "expected at most 65536 keys, found 65537"));
    b.n = 0;
    put_header(&b, 3, LIMIT_GGUF_TENSORS + 1, 0);
    b.n += 40 * (LIMIT_GGUF_TENSORS + 1);
    assert_int_equal(gguf_parse(&g, b.p, b.n, "f.gguf", &err), ERR_LIMIT);
    assert_non_null(strstr(err.text, "expected at most 262144 tensors, found 262145"));
    free(b.p);
}

static void a_sentence_holds_the_end_of_a_long_path(void **state) {
    UNUSED(state);
    struct gguf *g;
    struct err_text err;
    char path[4000];
    memset(path, 'd', sizeof path);
    snprintf(path + sizeof path - 20, 20, "/model.gguf");
    assert_int_equal(gguf_parse(&g, (const uint8_t *)"x", 1, path, &err), ERR_FORMAT);
    assert_memory_equal(err.text, "...ddd", 6);
    assert_non_null(strstr(err.text, "ddd/model.gguf: expected a GGUF file"));
}

static void a_git_lfs_pointer_is_called_by_its_name(void **state) {
    UNUSED(state);
    struct gguf *g;
    struct err_text err;
    static const char text[] = "version https://git-lfs.github.com/spec/v1\n";
    assert_int_equal(gguf_parse(&g, (const uint8_t *)text, sizeof text - 1, "f.gguf", &err),
                     ERR_FORMAT);
    assert_non_null(strstr(err.text, "Git LFS pointer"));
}

static void a_file_cut_anywhere_is_refused(void **state) {
    UNUSED(state);
    struct bytes whole = build(&(struct spec){.cut = 28}); /* up to the last byte that counts */
    for (size_t n = 0; n < whole.n; n++) {
        uint8_t *p = malloc(n ? n : 1);
        struct gguf *g;
        struct err_text err = {{0}};
        memcpy(p, whole.p, n);
        int rc = gguf_parse(&g, p, n, "f.gguf", &err);
        if (rc >= 0) fail_msg("cut at %zu of %zu: expected a refusal, found ok", n, whole.n);
        assert_non_null(strstr(err.text, "expected"));
        free(p);
    }
    free(whole.p);
}

static void a_file_with_any_byte_changed_is_refused_or_read_but_never_overrun(void **state) {
    UNUSED(state);
    struct bytes b = build(&(struct spec){0});
    uint64_t sum = 0;
    for (size_t i = 0; i < b.n; i++)
        for (int bit = 0; bit < 9; bit++) {
            uint8_t mask = bit < 8 ? (uint8_t)(1 << bit) : 0xff;
            struct gguf *g;
            b.p[i] ^= mask;
            if (gguf_parse(&g, b.p, b.n, "f.gguf", NULL) == OK) {
                for (uint64_t t = 0; t < gguf_n_tensors(g); t++) {
                    const struct gguf_tensor *x = gguf_tensor_at(g, t);
                    for (uint64_t k = 0; k < x->bytes; k++) sum += x->data[k];
                }
                gguf_close(g);
            }
            b.p[i] ^= mask;
        }
    assert_true(sum > 0);
    free(b.p);
}

static void two_hundred_thousand_strings_and_ten_thousand_tensors_are_read(void **state) {
    UNUSED(state);
    const uint32_t n_strings = 200000, n_tensors = 10000;
    struct bytes b = {0};
    struct gguf *g;
    struct err_text err;
    char name[64];
    put_header(&b, 3, n_tensors, 1);
    put_key(&b, "tokens", GGUF_ARRAY);
    put_u32(&b, GGUF_STRING);
    put_u64(&b, n_strings);
    for (uint32_t i = 0; i < n_strings; i++) put_str(&b, i % 2 ? "x" : "");
    for (uint32_t i = 0; i < n_tensors; i++) {
        snprintf(name, sizeof name, "blk.%u.w", i * 7919 % n_tensors);
        put_tensor(&b, name, 1, (uint64_t[]){8}, 0, 32 * i);
    }
    put_padding(&b, 32);
    put_fill(&b, 32 * n_tensors, 1);
    if (gguf_parse(&g, b.p, b.n, "f.gguf", &err)) fail_msg("expected ok, found %s", err.text);
    struct gguf_cursor c = {0};
    struct gguf_str s;
    uint32_t found = 0;
    while (gguf_next_str(gguf_find(g, "tokens"), &c, &s)) found++;
    assert_int_equal(found, n_strings);
    for (uint32_t i = 0; i < n_tensors; i += 97) {
        snprintf(name, sizeof name, "blk.%u.w", i);
        const struct gguf_tensor *t = gguf_tensor_find(g, name);
        assert_non_null(t);
        assert_string_equal(t->name, name);
    }
    gguf_close(g);
    free(b.p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_right_file_gives_its_keys_and_tensors),
        cmocka_unit_test(strings_of_an_array_are_walked_in_place),
        cmocka_unit_test(a_value_is_read_by_kind_whatever_its_width),
        cmocka_unit_test(an_array_of_numbers_is_read_by_index),
        cmocka_unit_test(every_storable_type_has_the_size_of_the_format),
        cmocka_unit_test(the_last_tensor_may_lack_its_padding),
        cmocka_unit_test(a_wrong_file_is_refused_with_what_was_expected_and_found),
        cmocka_unit_test(an_alignment_of_its_own_is_obeyed),
        cmocka_unit_test(more_keys_or_tensors_than_the_limit_are_refused),
        cmocka_unit_test(a_sentence_holds_the_end_of_a_long_path),
        cmocka_unit_test(a_git_lfs_pointer_is_called_by_its_name),
        cmocka_unit_test(a_file_cut_anywhere_is_refused),
        cmocka_unit_test(a_file_with_any_byte_changed_is_refused_or_read_but_never_overrun),
        cmocka_unit_test(two_hundred_thousand_strings_and_ten_thousand_tensors_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
