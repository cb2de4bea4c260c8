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
    int init_result;
    _Atomic int n_open, n_shut; /* now; ever */
    int peer; /* what keeps one from reading the other's memory, 0: nothing; writing always goes */
    unsigned n;
    _Atomic int hang; /* calls do not return while it is set; 1: to look, 2: to start too */
    struct fake_nvml_device device[2];
};

/* In a process that nobody can reach: FAKE_NVML_DEVICES=N has N devices, and while the file that
 * FAKE_NVML_HANG names is there, looks do not return. */

#endif
