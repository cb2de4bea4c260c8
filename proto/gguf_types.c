/* proto/gguf_types.c: which value and tensor types the format knows.
 *
 * Owns: constant tables.  Called by: the rest of proto/gguf*.c, the worker, the coordinator's plan.
 * Fails how: NULL for a type that cannot stand in a file.  Limits: none.
 * Tested by: tests/unit/test_gguf.c, against sizes written out again there.
 *
 * The table holds every storable type, also those that kernels/ has no decoder for: a size is
 * needed to find the next tensor, and "no decoder for IQ2_XXS" is a better sentence than "unknown".
 */
#include "proto/gguf_part.h"

static const struct gguf_type_info types[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},
    [3] = {"Q4_1", 32, 20},      [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},
    [8] = {"Q8_0", 32, 34},      [10] = {"Q2_K", 256, 84},    [11] = {"Q3_K", 256, 110},
    [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},   [14] = {"Q6_K", 256, 210},
    [16] = {"IQ2_XXS", 256, 66}, [17] = {"IQ2_XS", 256, 74},  [18] = {"IQ3_XXS", 256, 98},
    [19] = {"IQ1_S", 256, 50},   [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},   [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},
    [25] = {"I16", 1, 2},        [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},
    [28] = {"F64", 1, 8},        [29] = {"IQ1_M", 256, 56},   [30] = {"BF16", 1, 2},
    [34] = {"TQ1_0", 256, 54},   [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},
    [40] = {"NVFP4", 64, 36},    [41] = {"Q1_0", 128, 18},    [42] = {"Q2_0", 64, 18},
};

const struct gguf_type_info *gguf_type_info(uint32_t type) {
    return type < ARRAY_LEN(types) && types[type].block_elems ? &types[type] : NULL;
}

const char *gguf_type_refusal(uint32_t type) {
    switch (type) {
    case 9:
    case 15: return "a working format of runtimes, never stored";
    case 4: case 5: case 31: case 32: case 33: case 36: case 37: case 38:
        return "a type removed from the format";
    }
    return type >= 97 && type < 1024 ? "a private type of another runtime" : "an unknown type";
}

const char *gguf_value_type_name(uint32_t type) {
    static const char *const names[GGUF_VALUE_TYPES] = {
        [GGUF_U8] = "u8",      [GGUF_I8] = "i8",   [GGUF_U16] = "u16",      [GGUF_I16] = "i16",
        [GGUF_U32] = "u32",    [GGUF_I32] = "i32", [GGUF_F32] = "f32",      [GGUF_BOOL] = "bool",
        [GGUF_STRING] = "string", [GGUF_ARRAY] = "array", [GGUF_U64] = "u64", [GGUF_I64] = "i64",
        [GGUF_F64] = "f64",
    };
    return type < GGUF_VALUE_TYPES ? names[type] : "unknown";
}
