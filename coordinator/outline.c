/* coordinator/outline.c: how much JSON a text will become: see outline.h.
 *
 * Owns: nothing.  Called by: openai.c, chat.c.  Fails how: never.
 * Tested by: tests/unit/test_openai.c, tests/unit/test_chat.c
 *
 * Commas and opening brackets outside strings are counted; what is not JSON is counted all the
 * same, and refused by the parser afterwards.
 */
#include "coordinator/outline.h"

#include "proto/limits.h"

struct outline outline_of(const char *p, size_t n) {
    struct outline o = {.values = 1};
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        if (in_string) {
            if (p[i] == '\\')
                i++;
            else if (p[i] == '"')
                in_string = false;
        } else if (p[i] == '"') {
            in_string = true;
        } else if (p[i] == '[' || p[i] == '{') {
            o.lists++;
            o.values++;
            if (++depth > o.depth) o.depth = depth;
        } else if (p[i] == ',') {
            o.values++;
        } else if ((p[i] == ']' || p[i] == '}') && depth > 0) {
            depth--;
        }
    }
    return o;
}

bool outline_fits(const struct outline *o) {
    return o->depth <= LIMIT_JSON_DEPTH && o->lists <= LIMIT_JSON_LISTS &&
           o->values <= LIMIT_JSON_VALUES;
}
