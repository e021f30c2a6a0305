"""native/worker_pool: its queue of jobs, with calls that wait for each other at gates."""

from pathlib import Path

import pytest

from tests.native.test_sanitizers import SANITIZERS, missing
from tests.support.native.native_build import build_program, succeed

BUILDS = ["plain", "address", pytest.param("thread", marks=pytest.mark.extra)]


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest) -> Path:
    """The test program; plain, and with sanitizers, which see all of it."""
    name, flags = "pool", ""
    if request.param != "plain":
        if reason := missing(SANITIZERS[request.param]):
            pytest.skip(reason)
        name, flags = f"pool-{request.param}", SANITIZERS[request.param].flags
    folder = build_program(name, "pool", HETERO_SANITIZE=flags)
    return folder / "tests" / "native" / "pool" / "pool"


@pytest.mark.parametrize(
    "case",
    [
        "a_job_does_not_wait_for_the_one_before",
        "workers_join_the_job_that_the_caller_is_at",
        "an_error_leaves_out_what_was_not_begun_and_other_jobs_alone",
        "one_thread_computes_all_that_it_posts",
        "a_job_without_calls_ends_at_once",
        "workers_stop_while_jobs_are_queued",
        "many_threads_post_and_run",
        "no_more_workers_are_woken_than_there_are_calls_for",
        "each_node_takes_its_own_range",
        "a_blocked_nodes_range_is_taken_by_the_others",
        "a_worker_takes_its_own_range_of_every_job_before_others",
        "a_caller_on_no_node_takes_all",
        "every_index_is_called_once_whatever_the_nodes",
        "a_fork_while_an_object_of_the_process_is_made",
    ],
)
def test_a_case_of_jobs(program: Path, case: str) -> None:
    succeed([str(program), case])
