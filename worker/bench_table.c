/* worker/bench_table.c: rows of the benchmark, for people and as CSV.
 *
 * Owns: the CSV file.  Called by: the other parts of the benchmark.
 * Fails how: a file that cannot be made is a sentence.  Limits: none.
 * Tested by: tests/tree/test_bench.py
 *
 * The floor of a row is the longer of two times: its bytes at the read bandwidth and its operations
 * at the matrix rate, both measured in the same run.
 */
#include <errno.h>
#include <string.h>

#include "worker/bench.h"

static const char header[] =
    "section,name,shape,rows,context,calls,us,fastest_us,slowest_us,bytes,flops,floor_us,times_"
    "floor,"
    "gb_s,of_bandwidth,tflop_s,of_matrix_rate,tokens,tokens_s,distinct_experts,note\n";

static double ratio(double a, double b) {
    return b > 0 ? a / b : 0;
}

bool bench_table_open(struct bench *b, const char *csv_path) {
    b->csv = csv_path ? fopen(csv_path, "we") : NULL;
    if (csv_path && !b->csv)
        fprintf(stderr, "bench: --csv: expected to write %s, found: %s\n", csv_path,
                strerror(errno));
    if (b->csv) fputs(header, b->csv);
    return !csv_path || b->csv;
}

void bench_table_close(struct bench *b) {
    if (b->csv && fclose(b->csv) != 0)
        fprintf(stderr, "bench: --csv: expected to write it, found: %s\n", strerror(errno));
    b->csv = NULL;
}

void bench_table_head(const struct bench *b, const char *title) {
    printf("\n%s, %s\n%-30s %6s %7s %11s %10s %7s %14s %15s %10s\n", b->shape, title, "", "rows",
           "context", "us", "floor us", "x floor", "GB/s", "TFLOP/s", "tokens/s");
}

static double floor_us(const struct bench *b, const struct bench_row *r) {
    return 1e6 * MAX(ratio(r->bytes, b->bytes_s), ratio(r->flops, b->flops_s));
}

static void put_rate(double rate, double part) {
    if (rate > 0)
        printf(" %8.4g (%3.0f%%)", rate, 100 * part);
    else
        printf(" %15s", "");
}

void bench_table_put(const struct bench *b, const struct bench_row *r) {
    double floor = floor_us(b, r), gb_s = ratio(r->bytes, r->us) / 1e3,
           tflop_s = ratio(r->flops, r->us) / 1e6, tokens_s = ratio(r->tokens, r->us) * 1e6;
    double of_bandwidth = ratio(gb_s * 1e9, b->bytes_s),
           of_rate = ratio(tflop_s * 1e12, b->flops_s);
    const char *name = r->name[0] ? r->name : r->section;
    printf("%-30s %6d %7d %11.2f %10.2f %7.2f", name, r->rows, r->context, r->us, floor,
           ratio(r->us, floor));
    put_rate(gb_s, of_bandwidth);
    put_rate(tflop_s, of_rate);
    if (tokens_s > 0) printf(" %10.1f", tokens_s);
    if (r->distinct > 0) printf("  %.0f experts", r->distinct);
    if (r->calls > 0) printf("  mean of %d", r->calls);
    printf("  (%.1f to %.1f)\n", r->fastest_us, r->slowest_us);
    fflush(stdout);
    if (!b->csv) return;
    fprintf(b->csv,
            "%s,\"%s\",%s,%d,%d,%d,%.3f,%.3f,%.3f,%.0f,%.0f,%.3f,%.4f,%.2f,%.4f,%.4f,%.4f,%.0f,"
            "%.2f,%.1f,\n",
            r->section, r->name, b->shape, r->rows, r->context, r->calls, r->us, r->fastest_us,
            r->slowest_us, r->bytes, r->flops, floor, ratio(r->us, floor), gb_s, of_bandwidth,
            tflop_s, of_rate, r->tokens, tokens_s, r->distinct);
    fflush(b->csv);
}

void bench_table_note(const struct bench *b, const char *section, int rows, int context,
                      const char *why) {
    printf("%-30s %6d %7d  %s\n", section, rows, context, why);
    if (b->csv)
        fprintf(b->csv, "%s,\"\",%s,%d,%d,,,,,,,,,,,,,,,,\"%s\"\n", section, b->shape, rows,
                context, why);
}
