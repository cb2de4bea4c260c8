/* tests/unit/fake_nvml.h: the state of the stand-in for libnvidia-ml.so.1, which the test finds in
 * the library as fake_nvml_state.
 */
#ifndef OCTAVO_TESTS_UNIT_FAKE_NVML_H
#define OCTAVO_TESTS_UNIT_FAKE_NVML_H

#define FAKE_NVML_PROCESSES 300

struct fake_nvml_device {
    char uuid[48], bus_id[32];
    unsigned long long total, used;
    int handle_result, result, list_result; /* 0, or an error of NVML */
    unsigned n, pid[FAKE_NVML_PROCESSES];
    unsigned long long bytes[FAKE_NVML_PROCESSES];
    unsigned drawing;                       /* pid of a process that draws, 0: none */
    unsigned long long xid;                 /* to be told once */
    int watched;
    unsigned link[4]; /* generation, the most, width, the most */
};

struct fake_nvml {
    int init_result, n_open;
    int peer; /* what keeps one from reading the other's memory, 0: nothing; writing always goes */
    unsigned n;
    struct fake_nvml_device device[2];
};

#endif
