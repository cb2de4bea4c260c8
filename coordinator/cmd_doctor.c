/* coordinator/cmd_doctor.c: `octavo doctor`: what this machine is like, whether its ranks can add
 * up, and what to fix, before any weights are read.
 *
 * Exit code: 0 nothing that stops a service · 1 something does · 2 asked wrongly.
 *
 * Owns: the report while it runs.  Called by: main.c.  Fails how: see above.
 * Limits: LOGS_MAX.  Tested by: tests/unit/test_doctor.c, tests/faults/test_doctor.py
 *
 * Looking at registers tells what may go wrong, and trying tells what does: so everything is read
 * first, then all-reduces run in processes that may hang, crash or leave the device, and the two
 * are told together.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coordinator/cmd.h"
#include "coordinator/doctor.h"
#include "coordinator/doctor_bundle.h"
#include "coordinator/http_ask.h"
#include "coordinator/settings.h"
#include "proto/limits.h"
#include "proto/opt.h"

#define LOGS_MAX    32
#define URL_DEFAULT "http://127.0.0.1:8000"

extern char **environ;

struct asked {
    struct settings s; /* of it device, devices, collective, tp, worker, device_memory */
    int64_t limit_s;
    bool json, look_only;
    const char *bundle, *url, *key_file;
    int n_logs;
    char **logs;
    char key[LIMIT_API_KEY_BYTES + 1];
};

static const char usage[] =
    "usage: octavo doctor [OPTION…] [LOGFILE…]\n"
    "Looks at GPUs, their links and this host's limits, lets ranks add up, and says what to fix.\n"
    "Exit code: 0 nothing that stops a service, 1 something does, 2 asked wrongly.";

static int read_options(struct asked *a, int argc, char **argv, struct err_text *err) {
    const struct opt rows[] = {
        {.name = "tp",
         .value = "N",
         .kind = OPT_INT,
         .out = &a->s.tp,
         .min = 1,
         .max = LIMIT_RANKS,
         .shown = "as octavo serve",
         .help = "Ranks that add up."},
        {.name = "device",
         .kind = OPT_CHOICE,
         .out = &a->s.device,
         .choices = "cpu|cuda",
         .shown = "as octavo serve",
         .help = "What they add up on."},
        {.name = "devices",
         .value = "LIST",
         .kind = OPT_STRING,
         .out = &a->s.devices,
         .shown = "all of them",
         .help = "GPUs that ranks get in turn, like 0,1."},
        {.name = "collective",
         .kind = OPT_CHOICE,
         .out = &a->s.collective,
         .choices = "auto|shm|ipc|nccl",
         .shown = "auto: each way there is",
         .help = "How they add up."},
        {.name = "time-limit",
         .value = "SECONDS",
         .kind = OPT_INT,
         .out = &a->limit_s,
         .min = 1,
         .max = 3600,
         .shown = "20",
         .help = "How long one all-reduce may take, with its start."},
        {.name = "look-only",
         .kind = OPT_FLAG,
         .out = &a->look_only,
         .help = "No all-reduces: beside a service they would take its memory."},
        {.name = "json", .kind = OPT_FLAG, .out = &a->json, .help = "The report as JSON."},
        {.name = "bundle",
         .value = "FILE",
         .kind = OPT_STRING,
         .out = &a->bundle,
         .help = "Put report, LOGFILEs and what a running service says into this tar archive, "
                 "without keys."},
        {.name = "url",
         .value = "URL",
         .kind = OPT_STRING,
         .out = &a->url,
         .shown = URL_DEFAULT,
         .help = "Where that service listens."},
        {.name = "api-key-file",
         .value = "FILE",
         .kind = OPT_STRING,
         .out = &a->key_file,
         .help = "File whose first line is the key to show it."},
        {.name = "worker",
         .value = "PATH",
         .kind = OPT_STRING,
         .out = &a->s.worker,
         .help = "The worker's program.",
         .hidden = true},
        {.name = "device-memory",
         .value = "SOURCE",
         .kind = OPT_STRING,
         .out = &a->s.device_memory,
         .help = "none, nvml or script:PATH.",
         .hidden = true},
    };
    a->n_logs = opt_parse(rows, ARRAY_LEN(rows), argc, argv, LOGS_MAX, usage, err);
    a->logs = argv + 1;
    if (a->n_logs > 0 && !a->bundle)
        return err_set(err, ERR_SETUP, "expected --bundle with log files, found %.300s without it",
                       argv[1]);
    return a->n_logs;
}

/* ---- looking and trying ---------------------------------------------------------------------- */

static void look(struct doctor *d, const struct asked *a) {
    struct device_memory m = {0};
    struct err_text err = {0};
    const char *source = a->s.device_memory ? a->s.device_memory : "nvml";
    int rc = device_memory_open(&m, source, &err);
    if (rc < 0) json_object_set_new(d->report, "nvml_error", json_string(err.text));
    doctor_look_gpus(d, &m);
    device_memory_close(&m);
    doctor_look_pci(d);
    doctor_look_host(d);
    doctor_look_nccl(d, environ);
}

/* What keeps octavo serve from finding devices or its worker keeps a service from starting. */
static void try_ranks(struct doctor *d, struct asked *a) {
    struct err_text err = {0};
    if (settings_find_device(&a->s, &err) < 0) {
        doctor_find(d, DOCTOR_STOPS, "devices and worker", "what octavo serve would use",
                    "what the sentence says", "%s", err.text);
        return;
    }
    bool cuda = !strcmp(a->s.device, "cuda");
    const struct doctor_ranks r = {.worker = a->s.worker,
                                   .gpus = cuda ? &a->s.gpus : NULL,
                                   .collective = a->s.collective ? a->s.collective : "auto",
                                   .all = (int)a->s.tp,
                                   .limit_s = (int)a->limit_s};
    doctor_try_collectives(d, &r);
}

/* ---- telling --------------------------------------------------------------------------------- */

static int write_bundle(const struct doctor *d, const struct asked *a, struct err_text *err) {
    char folder[64], *text = NULL;
    const char *keys[] = {a->key[0] ? a->key : NULL, NULL};
    size_t n = 0;
    struct bundle *b;
    const char *host =
        json_string_value(json_object_get(json_object_get(d->report, "host"), "name"));
    snprintf(folder, sizeof folder, "octavo-%.20s", host && !strchr(host, '/') ? host : "host");
    TRY(bundle_open(&b, a->bundle, folder, keys, err));
    FILE *f = open_memstream(&text, &n);
    if (f) {
        doctor_print(d, f);
        fclose(f);
        bundle_add(b, "report.txt", text, n);
        free(text);
    }
    text = json_dumps(d->report, JSON_INDENT(2));
    if (text) bundle_add(b, "report.json", text, strlen(text));
    free(text);
    for (int i = 0; i < a->n_logs; i++) bundle_add_log(b, i, a->logs[i]);
    bundle_add_service(b, a->url, a->key[0] ? a->key : NULL);
    bundle_add_workers(b);
    return bundle_close(b, err);
}

static int tell(const struct doctor *d, const struct asked *a, struct err_text *err) {
    if (a->json) {
        json_dumpf(d->report, stdout, JSON_INDENT(2));
        putchar('\n');
    } else {
        doctor_print(d, stdout);
    }
    if (!a->bundle) return OK;
    TRY(write_bundle(d, a, err));
    fprintf(stderr, "octavo doctor: %s is ready to send: read it before you do\n", a->bundle);
    return OK;
}

int cmd_doctor(int argc, char **argv) {
    static struct asked a = {.url = URL_DEFAULT, .limit_s = 20};
    struct doctor d = {0};
    struct err_text err = {0};
    int code = EXIT_SETUP, rc = read_options(&a, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    if (rc >= 0) rc = http_ask_key(a.key, sizeof a.key, a.key_file, &err);
    if (rc >= 0) rc = doctor_init(&d, "");
    if (rc >= 0) {
        look(&d, &a);
        if (!a.look_only) try_ranks(&d, &a);
        rc = tell(&d, &a, &err);
        if (rc >= 0) code = doctor_worst(&d) == DOCTOR_STOPS ? EXIT_FAILED : EXIT_ASKED;
    }
    if (rc < 0) fprintf(stderr, "octavo doctor: %s\n", err.text[0] ? err.text : err_name(rc));
    doctor_deinit(&d);
    return code;
}
