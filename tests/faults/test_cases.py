"""Faults that other servers were reported to have, and which test tries each; those that had none are here.

A case has the letter of its kind (see the comments in CASES) and a number. One that needs a GPU or a driver names
the test that runs there, or what stands in for it here.
"""
import json
import os
import re
import signal
import socket
import time

from devices import HELD, MB, Devices, serving
from octavo import BUILD, PATIENCE, PHOTOSYNTHESIS, SOURCE, Stream, body_of, eventually, join_all, question

CASES = {
    # death of processes, orphans, device memory
    "A1": ["test_nothing_survives_the_coordinator"],
    "A4": ["test_killed_from_outside_nothing_of_it_is_left"],
    "A6": ["test_forty_clients_of_a_rank_that_dies_go_on_in_seconds"],
    "A8": ["test_out_of_pages_long_prompts_wait_or_are_computed_again_and_none_is_wrong"],
    "A9": ["test_a_launching_shell_whose_group_is_killed_takes_everything_along"],
    "A10": ["test_memory_that_a_stranger_takes_for_a_while_costs_a_pause", "a_rank_that_dies_costs_no_token",
            "test_a_stranger_with_our_memory_is_named_and_left_alone"],
    "A11": ["test_a_rank_killed_while_weights_load_is_named_and_replaced_in_seconds", "test_a_rank_killed_while_loading_is_replaced"],
    "A12": ["test_health_tells_of_a_dead_rank_without_any_traffic", "test_a_rank_killed_while_idle_is_noticed_and_replaced"],
    "A18": ["test_a_request_to_a_rank_that_does_not_listen_is_answered_and_the_rank_named", "a_rank_that_dies_costs_no_token"],
    "A19": ["test_a_rank_killed_inside_a_prompt_waits_for_memory_and_for_nothing_else", "test_a_rank_killed_in_the_middle_of_a_prompt_costs_none_of_it"],
    "A22": ["test_the_pid_in_the_first_line_of_the_log_is_the_one_to_stop"],
    "A23": ["test_ten_crashes_leave_nothing_behind", "test_deaths_leave_no_files_and_no_descriptors"],
    # ports
    "B1": ["test_pairs_that_start_at_the_same_moment_all_start"],
    "B3": ["test_a_taken_port_is_named_with_its_role", "test_a_taken_probe_port_is_a_wrong_set_up_that_says_which"],
    # links and devices
    "C1": ["test_two_four_and_all_ranks_add_up", "test_a_stuck_rank_is_named_within_the_time_limit", "test_links_are_checked_before_weights_are_read"],
    "C2": ["test_the_text_ends_with_what_to_fix", "an_inventory_gets_names_links_and_peers",
           "acs_that_redirects_is_named_with_its_bridge_and_the_command", "an_iommu_that_translates_is_told"],
    "C3": ["the_way_that_messages_take_is_known", "without_peers_no_level_of_peers_is_set"],
    "C7": ["test_a_lost_device_ends_the_service_with_3_without_waiting", "an_xid_is_told_with_the_error_and_off_the_bus_is_lost",
           "test_at_start_a_lost_device_is_exit_code_3"],
    "C8": ["test_a_lost_device_ends_the_service_with_3_without_waiting", "a_lost_device_is_told_from_one_that_cannot_be_read"],
    # health
    "D1": ["test_every_route_says_what_the_table_says", "test_health_tells_of_a_dead_rank_without_any_traffic", "test_a_stopped_rank_is_named_within_five_seconds"],
    "D2": ["a_long_prompt_alone"],
    "D4": ["test_every_route_says_what_the_table_says"],
    "D6": ["all_ranks_are_frozen"],
    "D7": ["idle"],
    "D9": ["test_every_route_says_what_the_table_says", "health_tells_the_state"],
    "D10": ["test_thirty_clients_that_leave_leave_nothing"],
    "D13": ["test_scraping_does_not_disturb_streams"],
    # overload and shutdown
    "E1": ["test_asked_to_stop_it_finishes_running_streams", "test_while_it_drains_new_requests_are_refused", "test_asked_twice_it_stops_at_once"],
    "E3": ["test_requests_far_beyond_the_queue_are_answered_or_refused_every_one", "test_a_full_queue_refuses_n_answers_as_n_and_says_when_to_come_back"],
    # streams that fail, clients that leave, parts that are missing
    "I12": ["test_streams_end_with_an_error_after_the_tokens_they_had", "test_those_who_wait_in_the_queue_are_told_too"],
    "L1": ["test_a_client_that_leaves_is_forgotten_at_once"],
    "L4": ["test_a_client_that_asks_again_and_again_costs_one_prefill", "test_a_prompt_given_up_and_asked_again_three_times_is_computed_once_at_a_time"],
    "L7": ["test_a_client_that_does_not_read_is_bounded_and_slows_nobody"],
    "P8": ["a_missing_part_is_named", "an_empty_or_cut_part_is_named", "mixed_up_parts_are_named"],
}


def test_every_case_names_tests_that_exist():
    sources = [p.read_text(errors="replace") for p in (SOURCE / "tests").rglob("*") if p.suffix in (".py", ".c", ".cu")]
    there = {n for s in sources for n in re.findall(r"^(?:def|static void) (\w+)\(", s, re.M)}
    named = {n for names in CASES.values() for n in names}
    assert len(CASES) >= 30 and all(CASES.values())
    assert not named - there, f"expected these tests, found none: {sorted(named - there)}"


def endless(**more):
    return question(PHOTOSYNTHESIS, extra_body=dict(ignore_eos=True), **more)


def test_forty_clients_of_a_rank_that_dies_go_on_in_seconds(launch):
    server = launch(tp=8).wait_ready()
    streams = [Stream(server, endless(max_tokens=120)) for _ in range(40)]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 2 for s in streams), 60, "two pieces on every stream", server)
    os.kill(server.workers()[1]["pid"], signal.SIGKILL)
    before, start = [s.deltas for s in streams], time.monotonic()
    eventually(lambda: all(s.deltas > n + 1 or not s.is_alive() for s, n in zip(streams, before)), 60, "every stream goes on", server)
    assert time.monotonic() - start < 10 * PATIENCE, "expected a few seconds"
    join_all(streams, 120)
    assert {(s.error, s.text) for s in streams} == {(None, streams[0].text)}, server.log_end()
    server.stop()


def test_memory_that_a_stranger_takes_for_a_while_costs_a_pause(launch, tmp_path):
    """Nothing is started into memory that somebody else has; when he is gone, the service goes on."""
    devices = Devices(tmp_path)
    server, pids = serving(launch, devices)
    stream = Stream(server, endless(max_tokens=300))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    devices.hold({pids[0]: HELD, os.getpid(): 2 * HELD})
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: f"process {os.getpid()}" in server.http("/health/ready")[2], 30, "health that names who has the memory", server)
    assert server.workers()[1]["state"] == "reclaiming" and stream.is_alive()
    devices.hold({pids[0]: HELD})
    join_all([stream], 60)
    assert stream.error is None and stream.reason == "length", server.log_end()
    server.check_healthy()
    server.stop()


def test_a_rank_killed_while_weights_load_is_named_and_replaced_in_seconds(launch):
    server = launch(tp=8, env=dict(LD_PRELOAD=str(BUILD / "libslow-read.so"), READ_STOP="5 1000000")).wait_port()
    held = lambda: [w["pid"] for w in server.workers() if w["rank"] == 5 and w["pid"] > 0 and is_stopped(w["pid"])]
    pid = eventually(held, 30, "rank 5 in the middle of its weights", server)[0]
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    server.wait_ready()
    assert time.monotonic() - start < 10 * PATIENCE
    assert re.search(rf" died rank=5 pid={pid} cause=exit .*while=loading .*signal 9", server.log()), server.log_end()
    assert [w["restarts"] for w in server.workers()] == [int(r == 5) for r in range(8)]
    server.check_healthy()
    server.stop()


def is_stopped(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def test_a_request_to_a_rank_that_does_not_listen_is_answered_and_the_rank_named(launch):
    server = launch(tp=2).wait_ready()
    os.kill(server.workers()[1]["pid"], signal.SIGSTOP)
    server.check_healthy()
    assert re.search(r" died rank=1 .*cause=silent .*no heartbeat", server.log()), server.log_end()
    server.stop()


def long_prompt(words):
    return question("lamp zebra " * words, max_tokens=3)


def test_a_rank_killed_inside_a_prompt_waits_for_memory_and_for_nothing_else(launch, tmp_path):
    """The device says of itself what it likes; memory and the list of processes decide."""
    devices = Devices(tmp_path)
    server, pids = serving(launch, devices, "--max-step-tokens", 64)
    stream = Stream(server, long_prompt(450))
    first = server.workers()[0]["last_step"]
    stream.start()
    eventually(lambda: server.workers()[0]["last_step"] >= first + 3, 30, "three steps of the prompt", server)
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: server.workers()[1]["state"] == "reclaiming", 30, "the wait for memory", server)
    devices.hold({pids[0]: HELD}, used=HELD + 100 * MB)  # the driver keeps a little
    join_all([stream], 60)
    assert stream.error is None and "verdict=returned" in server.log(), server.log_end()
    server.stop()


def test_a_prompt_given_up_and_asked_again_three_times_is_computed_once_at_a_time(launch):
    server = launch("--max-seqs", 8, "--max-step-tokens", 8, tp=2).wait_ready()
    told = lambda: json.loads(server.http("/health/progress")[2])["prefill"] or dict(prompts=0)
    body = json.dumps(body_of(long_prompt(350) | dict(stream=True))).encode()
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: told()["prompts"] == 1 and 0 < told().get("tokens_done", 0), 30, "one prompt at work", server)
    eventually(lambda: server.running() == 0 and told()["prompts"] == 0, 10, "no prompt at work after its client left", server)
    server.check_healthy()
    server.stop()
