/* coordinator/http_ask.c: one HTTP request from the command line. See http_ask.h.
 *
 * Owns: the socket.  Called by: cmd_probe.c.  Fails how: see http_ask.h.  Limits: HTTP_ASK_BYTES.
 * Tested by: tests/unit/test_http_ask.c
 *
 * A probe asks one question and goes, so this blocks, with one deadline over everything from the
 * connecting to the last byte: a server that drips is as dead to a script as one that is silent. The
 * request says Connection: close and the answer ends where the connection does, or earlier by its
 * Content-Length; our servers send no probe's answer in chunks.
 */
#include "coordinator/http_ask.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define RETRY_MS 5

struct asking {
    int fd;
    uint64_t due_ms;
};

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int await(const struct asking *k, short events, struct err_text *err) {
    for (;;) {
        uint64_t now = now_ms();
        struct pollfd p = {.fd = k->fd, .events = events};
        int n = now < k->due_ms ? poll(&p, 1, (int)(k->due_ms - now)) : 0;
        if (n > 0) return OK;
        if (n == 0) return err_set(err, ERR_TIMEOUT, "no answer in time");
        if (errno != EINTR) return err_set(err, ERR_SYS, "%s", strerror(errno));
    }
}

static int connect_to(struct asking *k, int family, const struct sockaddr *a, socklen_t n,
                      struct err_text *err) {
    k->fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (k->fd < 0) return err_set(err, ERR_SYS, "%s", strerror(errno));
    int error = connect(k->fd, a, n) < 0 ? errno : 0;
    while (error == EAGAIN && now_ms() < k->due_ms) { /* a Unix socket whose backlog is full */
        poll(NULL, 0, RETRY_MS);
        error = connect(k->fd, a, n) < 0 ? errno : 0;
    }
    if (error == EINPROGRESS) {
        socklen_t size = sizeof error;
        TRY(await(k, POLLOUT, err));
        getsockopt(k->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) return OK;
    return err_set(err, error == ECONNREFUSED || error == ENOENT ? ERR_NOT_FOUND : ERR_SYS, "%s",
                   strerror(error));
}

static int connect_unix(struct asking *k, const char *name, struct err_text *err) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(name);
    if (n == 0 || n >= sizeof a.sun_path)
        return err_set(err, ERR_SETUP, "socket name of %zu bytes", n);
    memcpy(a.sun_path, name, n);
    if (name[0] == '@') a.sun_path[0] = 0;
    return connect_to(k, AF_UNIX, (struct sockaddr *)&a,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n), err);
}

static int connect_host(struct asking *k, const char *host, int port, struct err_text *err) {
    struct addrinfo *all, hints = {.ai_socktype = SOCK_STREAM};
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int rc = getaddrinfo(host, service, &hints, &all);
    if (rc != 0) return err_set(err, ERR_NOT_FOUND, "%.200s: %s", host, gai_strerror(rc));
    rc = ERR_NOT_FOUND;
    for (struct addrinfo *a = all; a && rc < 0; a = a->ai_next) {
        rc = connect_to(k, a->ai_family, a->ai_addr, a->ai_addrlen, err);
        if (rc < 0 && k->fd >= 0) close(k->fd);
        if (rc < 0) k->fd = -1;
    }
    freeaddrinfo(all);
    return rc;
}

static int send_all(struct asking *k, const char *p, size_t n, struct err_text *err) {
    while (n > 0) {
        ssize_t sent = send(k->fd, p, n, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
            TRY(await(k, POLLOUT, err));
            continue;
        }
        if (sent < 0) return err_set(err, ERR_SYS, "%s", strerror(errno));
        p += sent;
        n -= (size_t)sent;
    }
    return OK;
}

static int send_request(struct asking *k, const struct http_ask *a, struct err_text *err) {
    char head[2048];
    int n = snprintf(head, sizeof head,
                     "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n%s%s%s%s", a->method, a->path,
                     a->socket ? "localhost" : a->host, a->key ? "Authorization: Bearer " : "",
                     a->key ? a->key : "", a->key ? "\r\n" : "",
                     a->body ? "Content-Type: application/json\r\n" : "");
    if (a->body && n > 0 && (size_t)n < sizeof head)
        n += snprintf(head + n, sizeof head - (size_t)n, "Content-Length: %zu\r\n", strlen(a->body));
    if (n < 0 || (size_t)n + 2 >= sizeof head)
        return err_set(err, ERR_SETUP, "expected a key and a path of less than %zu bytes", sizeof head);
    memcpy(head + n, "\r\n", 3);
    TRY(send_all(k, head, (size_t)n + 2, err));
    return a->body ? send_all(k, a->body, strlen(a->body), err) : OK;
}

/* Where the body of what has been read begins; NULL: not there yet. */
static char *body_of(char *all) {
    char *end = strstr(all, "\r\n\r\n");
    return end ? end + 4 : NULL;
}

/* The whole answer is here, by its own account. */
static bool complete(char *all, size_t n) {
    char *body = body_of(all), *length = body ? strcasestr(all, "\r\nContent-Length:") : NULL;
    if (!length || length > body) return false;
    return n - (size_t)(body - all) >= strtoull(length + 17, NULL, 10);
}

static int read_answer(struct asking *k, char *all, size_t cap, size_t *n, struct err_text *err) {
    *n = 0;
    all[0] = 0;
    while (!complete(all, *n)) {
        if (*n == cap - 1) return err_set(err, ERR_LIMIT, "an answer of more than %zu bytes", cap);
        ssize_t got = recv(k->fd, all + *n, cap - 1 - *n, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
            TRY(await(k, POLLIN, err));
            continue;
        }
        if (got < 0) return err_set(err, ERR_CLOSED, "%s", strerror(errno));
        if (got == 0) break;
        *n += (size_t)got;
        all[*n] = 0;
    }
    return OK;
}

static int parse_answer(char *all, size_t n, struct http_reply *out, struct err_text *err) {
    char *body = body_of(all);
    if (n < 12 || strncmp(all, "HTTP/1.", 7) || !body || !strchr(all, ' '))
        return err_set(err, ERR_FORMAT, n ? "no HTTP answer" : "closed without an answer");
    out->status = atoi(strchr(all, ' ') + 1);
    out->n = n - (size_t)(body - all);
    out->body = malloc(out->n + 1);
    if (!out->body) return err_set(err, ERR_NOMEM, "out of memory");
    memcpy(out->body, body, out->n);
    out->body[out->n] = 0;
    return OK;
}

int http_ask(const struct http_ask *a, struct http_reply *out, struct err_text *err) {
    struct asking k = {.fd = -1, .due_ms = now_ms() + (uint64_t)a->timeout_ms};
    char *all = malloc(HTTP_ASK_BYTES);
    size_t n = 0;
    *out = (struct http_reply){0};
    int rc = all ? OK : err_set(err, ERR_NOMEM, "out of memory");
    if (rc == OK)
        rc = a->socket ? connect_unix(&k, a->socket, err) : connect_host(&k, a->host, a->port, err);
    if (rc == OK) rc = send_request(&k, a, err);
    if (rc == OK) rc = read_answer(&k, all, HTTP_ASK_BYTES, &n, err);
    if (rc == OK) rc = parse_answer(all, n, out, err);
    if (k.fd >= 0) close(k.fd);
    free(all);
    return rc;
}

void http_reply_deinit(struct http_reply *r) {
    free(r->body);
    *r = (struct http_reply){0};
}

int http_ask_url(const char *url, char *host, size_t n, int *port, struct err_text *err) {
    const char *p = strncmp(url, "http://", 7) ? NULL : url + 7;
    if (!p) return err_set(err, ERR_SETUP, "--url: expected http://HOST[:PORT], found %.300s", url);
    bool bracket = *p == '[';
    if (bracket) p++;
    size_t len = strcspn(p, bracket ? "]" : ":/?#");
    const char *rest = p + len + (bracket && p[len] == ']');
    char *end = (char *)(uintptr_t)rest;
    long value = *rest == ':' ? strtol(rest + 1, &end, 10) : 80;
    if (len == 0 || len >= n || (bracket && p[len] != ']') || value < 1 || value > 65535 ||
        (*end && !strchr("/?#", *end)))
        return err_set(err, ERR_SETUP, "--url: expected http://HOST[:PORT], found %.300s", url);
    memcpy(host, p, len);
    host[len] = 0;
    *port = (int)value;
    return OK;
}

int http_ask_key(char *key, size_t n, const char *file, struct err_text *err) {
    const char *set = getenv("OCTAVO_API_KEY");
    snprintf(key, n, "%s", set ? set : "");
    if (!file) return OK;
    FILE *f = fopen(file, "re");
    bool got = f && fgets(key, (int)n, f);
    if (f) fclose(f);
    if (!got)
        return err_set(err, ERR_SETUP, "--api-key-file %.300s: expected a key in its first line, "
                                       "found none", file);
    key[strcspn(key, " \t\r\n")] = 0;
    return OK;
}
