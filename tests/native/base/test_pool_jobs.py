"""native/worker_pool: its queue of jobs, with calls that wait for each other at gates."""

from pathlib import Path

import pytest

from tests.support.native.native_build import build_program, succeed


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("pool", "pool") / "tests" / "native" / "pool" / "pool"


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
    ],
)
def test_a_case_of_jobs(program: Path, case: str) -> None:
    succeed([str(program), case])
