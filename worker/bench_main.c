/* worker/bench_main.c: the benchmark as a program of its own, for machines that have a GPU but none
 * of the messaging libraries.
 */
#include "worker/bench.h"

int main(int argc, char **argv) {
    return bench_main(argc - 1, argv + 1);
}
