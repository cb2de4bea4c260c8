/* coordinator/device_thread.c: see device_thread.h.
 *
 * Owns, called by, fails how, limits, tested by: see device_thread.h.
 *
 * A driver in trouble does not return from a call, and the caller is the thread that feeds the
 * workers and answers clients. So one thread makes all the calls, and the loop leaves a question and
 * takes the answer. Nearly always that takes less than a tenth of a millisecond, so whoever asks
 * waits for it, but for LOOK_MS at most and only once: a question that is still open costs nothing
 * to ask again. A thread that does not come back cannot be stopped and is left behind with what it
 * holds; the process is about to end then.
 */
#include "coordinator/device_thread.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/log.h"

#define LOOK_MS  5
#define CLOSE_MS 1000
#define STALE_US 1000000 /* an answer that nobody took for so long says nothing of now */

struct question {
    bool asked, answered;
    uint64_t asked_us;
    struct device_sample sample;
    char text[200];
};

struct device_thread {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards everything below but inner, which is the thread's */
    pthread_cond_t asked, answered;
    char source[600];
    int rc; /* of opening */
    struct err_text err;
    bool opened, busy, closing, left; /* left: nobody else will free it */
    int count;
    struct question device[DEVICE_MAX];
    struct device_memory inner;
};

static void free_thread(struct device_thread *t) {
    pthread_cond_destroy(&t->asked);
    pthread_cond_destroy(&t->answered);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* With the mutex held, which is let go of while the driver is asked. */
static void answer(struct device_thread *t, int device) {
    struct question *q = &t->device[device];
    struct device_sample s;
    char text[sizeof q->text];
    uint64_t asked_us = q->asked_us;
    t->busy = true;
    pthread_mutex_unlock(&t->mutex);
    device_memory_look(&t->inner, device, asked_us, &s);
    device_memory_describe(&t->inner, device, text, sizeof text);
    pthread_mutex_lock(&t->mutex);
    t->busy = false;
    q->sample = s;
    q->answered = true;
    memcpy(q->text, text, sizeof text);
    pthread_cond_broadcast(&t->answered);
}

static int next_question(const struct device_thread *t) {
    for (int d = 0; d < t->count; d++)
        if (t->device[d].asked && !t->device[d].answered) return d;
    return -1;
}

static void open_inner(struct device_thread *t) {
    struct err_text err = {0};
    int rc = device_memory_open(&t->inner, t->source, &err);
    int count = rc == OK ? device_memory_count(&t->inner) : 0;
    for (int d = 0; d < count; d++)
        device_memory_describe(&t->inner, d, t->device[d].text, sizeof t->device[d].text);
    pthread_mutex_lock(&t->mutex);
    t->rc = rc;
    t->err = err;
    t->count = count;
    t->opened = true;
    pthread_cond_broadcast(&t->answered);
}

static void *thread_main(void *arg) {
    struct device_thread *t = arg;
    open_inner(t); /* returns with the mutex held */
    while (!t->closing && t->rc == OK) {
        int device = next_question(t);
        if (device < 0) pthread_cond_wait(&t->asked, &t->mutex);
        else answer(t, device);
    }
    pthread_mutex_unlock(&t->mutex);
    if (t->rc == OK) device_memory_close(&t->inner);
    pthread_mutex_lock(&t->mutex);
    bool left = t->left;
    pthread_mutex_unlock(&t->mutex);
    if (left) free_thread(t); /* nobody else knows it any more */
    return NULL;
}

/* ---- the loop's side ------------------------------------------------------------------------- */

/* With the mutex held: waits until *flag is `value`, and says whether it is. */
static bool wait_for(struct device_thread *t, const bool *flag, bool value, int ms) {
    struct timespec due;
    clock_gettime(CLOCK_MONOTONIC, &due);
    due.tv_sec += ms / 1000;
    due.tv_nsec += ms % 1000 * 1000000L;
    if (due.tv_nsec >= 1000000000L) {
        due.tv_sec++;
        due.tv_nsec -= 1000000000L;
    }
    while (*flag != value)
        if (pthread_cond_timedwait(&t->answered, &t->mutex, &due) == ETIMEDOUT) break;
    return *flag == value;
}

static int thread_count(void *ctx) {
    return ((struct device_thread *)ctx)->count; /* set before anybody could ask */
}

static void thread_look(void *ctx, int device, uint64_t now_us, struct device_sample *out) {
    struct device_thread *t = ctx;
    struct question *q = &t->device[device];
    pthread_mutex_lock(&t->mutex);
    if (q->answered && now_us - q->asked_us > STALE_US) q->asked = q->answered = false;
    if (!q->asked) {
        q->asked = true;
        q->asked_us = now_us;
        pthread_cond_signal(&t->asked);
        wait_for(t, &q->answered, true, LOOK_MS);
    }
    if (q->answered) {
        *out = q->sample;
        out->asked_us = q->asked_us;
        q->asked = q->answered = false;
    } else
        device_sample_fail(out, DEVICE_SILENT, "the driver has not answered for %.1f s",
                           (double)(now_us - q->asked_us) / 1e6);
    pthread_mutex_unlock(&t->mutex);
}

static void thread_describe(void *ctx, int device, char *out, size_t n) {
    struct device_thread *t = ctx;
    pthread_mutex_lock(&t->mutex);
    snprintf(out, n, "%s", t->device[device].text);
    pthread_mutex_unlock(&t->mutex);
}

/* With the mutex held, which is let go of. A thread that is inside the driver keeps what it works
 * with, and frees it if it ever comes back. */
static void leave(struct device_thread *t, bool back) {
    t->closing = true;
    t->left = !back;
    pthread_cond_signal(&t->asked);
    pthread_t thread = t->thread;
    pthread_mutex_unlock(&t->mutex);
    if (!back) {
        log_warn("driver_silent", "why=\"a call to the driver did not return: its thread is left\"");
        pthread_detach(thread);
        return;
    }
    pthread_join(thread, NULL);
    free_thread(t);
}

static void thread_close(void *ctx) {
    struct device_thread *t = ctx;
    pthread_mutex_lock(&t->mutex);
    leave(t, wait_for(t, &t->busy, false, CLOSE_MS));
}

static const struct device_memory_ops thread_ops = {"nvml", thread_count, thread_look,
                                                    thread_describe, thread_close};

static struct device_thread *new_thread(const char *source) {
    struct device_thread *t = calloc(1, sizeof *t);
    pthread_condattr_t attr;
    if (!t) return NULL;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->asked, &attr);
    pthread_cond_init(&t->answered, &attr);
    pthread_condattr_destroy(&attr);
    snprintf(t->source, sizeof t->source, "%s", source);
    if (pthread_create(&t->thread, NULL, thread_main, t) == 0) return t;
    free(t);
    return NULL;
}

int device_thread_open(struct device_memory *m, const char *source, int bound_ms,
                       struct err_text *err) {
    const bool driver = !strcmp(source, "nvml");
    int rc = device_memory_open(m, driver ? "none" : source, err);
    if (!driver) return rc;
    struct device_thread *t = new_thread(source);
    if (!t) return err_set(err, ERR_NOMEM, "device memory: expected a thread, found none");
    pthread_mutex_lock(&t->mutex);
    bool opened = wait_for(t, &t->opened, true, bound_ms);
    rc = opened ? t->rc : ERR_TIMEOUT;
    if (opened && err) *err = t->err;
    if (rc == OK) {
        pthread_mutex_unlock(&t->mutex);
        *m = (struct device_memory){&thread_ops, t};
        return OK;
    }
    leave(t, opened);
    if (opened) return rc;
    return err_set(err, ERR_TIMEOUT, "device memory: expected the driver to answer within %.1f s, "
                                     "found it silent", bound_ms / 1e3);
}
