/* tests/fuzz/fuzz_msg.c: any bytes are refused or become a message that packs and reads back.
 *
 * Owns: two messages, kept between inputs and poisoned, so that a field the unpacker forgot shows.
 * Built as a fuzzer with clang, and always as a replay of tests/fuzz/corpus/msg (see replay.c).
 */
#include <stdlib.h>
#include <string.h>

#include "proto/msg.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static struct msg first, second;
    static struct msg_buf once, twice;
    static bool poisoned;
    if (!poisoned) {
        memset(&first, 0xa5, sizeof first);
        memset(&second, 0x5a, sizeof second);
        poisoned = true;
    }
    if (msg_unpack(&first, bytes, size) != OK) return 0;
    assert(msg_pack(&once, &first) == OK);
    assert(msg_unpack(&second, once.p, once.n) == OK);
    assert(msg_pack(&twice, &second) == OK);
    assert(once.n == twice.n && !memcmp(once.p, twice.p, once.n));
    return 0;
}
