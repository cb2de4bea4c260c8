/* tests/unit/fake_nccl.c: a stand-in for libnccl.so.2 whose ranks are threads of one process and
 * whose device memory is the host's.
 *
 * Like a non-blocking communicator, a call only announces itself; what is asked is done when the
 * last rank has announced the same, and until then the state is "in progress". Sums run from the
 * last rank down, so that they are not those in rank order. ncclCommAbort waits for the graphs that
 * captured the communicator, as the real one does. Knobs and counters are for the test.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/fake_nccl.h"
#include "worker/nccl_api.h"

#define RANKS  16
#define GROUPS 64

struct fake_call {
    const void *send;
    void *recv;
    size_t count;
    int kind, root;
};

struct fake_group {
    int world, joined, announced, left;
    unsigned done; /* calls that all ranks have made */
    struct fake_call call[RANKS];
};

struct nccl_comm {
    struct fake_group *group;
    int rank;
    unsigned asked; /* calls of this rank */
};

struct fake_nccl_knobs fake_nccl_knobs;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct fake_group groups[GROUPS];
static int n_groups;

void fake_nccl_set_graphs(int n);
void fake_nccl_set_graphs(int n) { /* negative: so many fewer */
    pthread_mutex_lock(&mutex);
    fake_nccl_knobs.graphs = n < 0 ? fake_nccl_knobs.graphs + n : n;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

int ncclGetVersion(int *version);
int ncclGetVersion(int *version) {
    *version = 22899;
    return NCCL_SUCCESS;
}

const char *ncclGetErrorString(int rc);
const char *ncclGetErrorString(int rc) {
    return rc == 6 ? "remote error of the stand-in" : "an error of the stand-in";
}

int ncclGetUniqueId(struct nccl_id *id);
int ncclGetUniqueId(struct nccl_id *id) {
    if (fake_nccl_knobs.refuse_id) return 2;
    pthread_mutex_lock(&mutex);
    int n = n_groups++ % GROUPS;
    memset(&groups[n], 0, sizeof groups[n]);
    pthread_mutex_unlock(&mutex);
    memset(id, 0x5a, sizeof *id);
    memcpy(id->bytes + 64, &n, sizeof n);
    return NCCL_SUCCESS;
}

/* As NCCL tells which way it goes, to those who ask it to tell. */
static void tell(int rank, int world) {
    const char *path = getenv("NCCL_DEBUG_FILE"), *level = getenv("NCCL_DEBUG");
    const char *off = getenv("NCCL_P2P_DISABLE");
    FILE *f = path && level && !strcmp(level, "INFO") ? fopen(path, "a") : NULL;
    for (int c = 0; f && world > 1 && c < 2; c++)
        fprintf(f, "box:1:1 [%d] NCCL INFO Channel %02d/0 : %d[%d] -> %d[%d] via %s\n", rank, c,
                rank, rank, (rank + 1) % world, (rank + 1) % world,
                off && *off == '1' ? "SHM/direct/direct" : "P2P/IPC");
    if (f) fclose(f);
}

int ncclCommInitRankConfig(struct nccl_comm **out, int world, struct nccl_id id, int rank,
                           struct nccl_config *config);
int ncclCommInitRankConfig(struct nccl_comm **out, int world, struct nccl_id id, int rank,
                           struct nccl_config *config) {
    int n;
    memcpy(&n, id.bytes + 64, sizeof n);
    if (config->magic != NCCL_MAGIC || config->size != sizeof *config || config->version < 21400 ||
        config->blocking != 0 || id.bytes[0] != 0x5a || n < 0 || n >= GROUPS)
        return 4;
    struct nccl_comm *c = calloc(1, sizeof *c);
    pthread_mutex_lock(&mutex);
    c->group = &groups[n];
    c->group->world = world;
    c->group->joined++;
    c->rank = rank;
    fake_nccl_knobs.inits++;
    tell(rank, world);
    pthread_mutex_unlock(&mutex);
    *out = c;
    return NCCL_IN_PROGRESS;
}

int ncclCommGetAsyncError(struct nccl_comm *c, int *state);
int ncclCommGetAsyncError(struct nccl_comm *c, int *state) {
    pthread_mutex_lock(&mutex);
    const struct fake_group *g = c->group;
    bool busy = fake_nccl_knobs.hang_init || g->joined < g->world || g->done < c->asked;
    pthread_mutex_unlock(&mutex);
    *state = busy ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

int ncclCommAbort(struct nccl_comm *c);
int ncclCommAbort(struct nccl_comm *c) {
    pthread_mutex_lock(&mutex);
    fake_nccl_knobs.aborts++;
    if (fake_nccl_knobs.graphs > 0) fake_nccl_knobs.waits_for_graphs++;
    pthread_cond_broadcast(&changed);
    while (fake_nccl_knobs.graphs > 0) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    free(c);
    return NCCL_SUCCESS;
}

/* What all ranks have asked for; the caller holds the mutex. */
static void perform(struct fake_group *g) {
    const struct fake_call *a = &g->call[0];
    float *sum = malloc(a->count * sizeof *sum);
    if (a->kind == 0) {
        memcpy(sum, g->call[g->world - 1].send, a->count * sizeof *sum);
        for (int r = g->world - 2; r >= 0; r--)
            for (size_t i = 0; i < a->count; i++) sum[i] += ((const float *)g->call[r].send)[i];
    }
    for (int r = 0; r < g->world; r++) {
        const struct fake_call *c = &g->call[r];
        if (c->kind == 0)
            memcpy(c->recv, sum, c->count * sizeof *sum);
        else if (c->kind == 1)
            for (int q = 0; q < g->world; q++)
                memcpy((char *)c->recv + (size_t)q * c->count, g->call[q].send, c->count);
        else if (r != c->root)
            memcpy(c->recv, g->call[c->root].send, c->count);
    }
    free(sum);
    g->announced = 0;
    g->done++;
}

static int announce(struct nccl_comm *c, struct fake_call call) {
    pthread_mutex_lock(&mutex);
    struct fake_group *g = c->group;
    g->call[c->rank] = call;
    c->asked++;
    if (++g->announced == g->world) perform(g);
    pthread_mutex_unlock(&mutex);
    return NCCL_IN_PROGRESS;
}

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, struct nccl_comm *c,
                  void *stream);
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, struct nccl_comm *c,
                  void *stream) {
    (void)stream;
    if (type != NCCL_FLOAT32 || op != NCCL_SUM) return 4;
    if (fake_nccl_knobs.fail_sum) return 6;
    return announce(c, (struct fake_call){send, recv, count, 0, 0});
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, struct nccl_comm *c,
                  void *stream);
int ncclAllGather(const void *send, void *recv, size_t count, int type, struct nccl_comm *c,
                  void *stream) {
    (void)stream;
    return type == NCCL_INT8 ? announce(c, (struct fake_call){send, recv, count, 1, 0}) : 4;
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root,
                  struct nccl_comm *c, void *stream);
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root,
                  struct nccl_comm *c, void *stream) {
    (void)stream;
    return type == NCCL_INT8 ? announce(c, (struct fake_call){send, recv, count, 2, root}) : 4;
}
