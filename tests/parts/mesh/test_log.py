import logging
import os
import threading
from pathlib import Path

import pytest

from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import MAX_LINE_BYTES, MAX_LINES_PER_WINDOW, WINDOW_S, EventRates, Level, format_line
from services.mesh.logs.log import MAX_QUEUED_LINES, Log, adopt_foreign_lines


def opened(tmp_path: Path, output: PatientOutput, level: Level = Level.INFO) -> Log:
    return Log("worker-1", level, RotatedFile(tmp_path / "log", 1_000_000, 2), output)


@pytest.fixture
def pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    return reader, writer


def drained(reader: int) -> bytes:
    os.set_blocking(reader, False)
    found = b""
    try:
        while chunk := os.read(reader, 65536):
            found += chunk
    except BlockingIOError:
        pass
    return found


def test_a_line_has_stable_keys() -> None:
    fields: dict[str, object] = {"port": 8000, "took_s": 0.123456789, "note": 'two "words"', "none": None}
    assert format_line(1_700_000_000.25, Level.WARNING, "router", "peer-lost", fields) == (
        '2023-11-14T22:13:20.250Z WARNING router peer-lost port=8000 took_s=0.123457 note="two \\"words\\"" none=None'
    )


@pytest.mark.parametrize("content", ["x\ny", "a=b", "", "\udcff", "é" * 9000, "\n" * 9000])
def test_a_line_is_one_line_within_its_bound(content: str) -> None:
    line = format_line(0.0, Level.INFO, "router", "event", {"content": content, "last": 1})
    assert "\n" not in line
    assert len(line.encode("utf-8", "backslashreplace")) < MAX_LINE_BYTES


def test_a_flood_is_counted_and_summed_up() -> None:
    rates = EventRates()
    passed = [rates.count("flood", 0.1 * index) <= MAX_LINES_PER_WINDOW for index in range(90)]
    assert sum(passed) == MAX_LINES_PER_WINDOW
    assert rates.count("other", 9.0) == 1
    assert rates.expired(WINDOW_S - 0.1) == []
    held_back = [rates.holding_back]
    assert rates.expired(WINDOW_S) == [("flood", 90 - MAX_LINES_PER_WINDOW)]
    assert [*held_back, rates.holding_back] == [True, False]
    assert rates.count("flood", WINDOW_S) == 1


def test_lines_reach_the_file_and_the_output(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = opened(tmp_path, PatientOutput(pipe[1]))
    log.info("ready", port=1)
    log.debug("detail")
    for index in range(MAX_LINES_PER_WINDOW + 5):
        log.error("broken", index=index)
    log.failure("failed", ValueError("wrong"))
    log.close()
    text = (tmp_path / "log").read_text()
    assert drained(pipe[0]).decode() == text
    assert "worker-1 ready port=1\n" in text
    assert "detail" not in text
    assert text.count(" broken index=") == MAX_LINES_PER_WINDOW
    assert "holding-lines-back of=broken" in text
    assert "lines-held-back of=broken count=5" in text
    assert 'failed error=wrong stack="ValueError: wrong"' in text


def test_a_reader_that_stands_still_holds_up_nobody(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """The terminal is paused: the file still gets every line, and afterwards the output says what it missed."""
    log = opened(tmp_path, PatientOutput(pipe[1]))
    events = [f"event-{index}" for index in range(300)]
    for event in events:
        log.info(event, filling="x" * 1000)
    written = threading.Event()
    threading.Thread(target=_wait_for_line, args=(tmp_path / "log", events[-1], written), daemon=True).start()
    assert written.wait(20.0)
    missed = len(events) - drained(pipe[0]).count(b"filling=")
    assert missed > 0
    log.info("afterwards")
    log.close()
    assert f"output-was-full lines_dropped={missed}" in drained(pipe[0]).decode()
    assert (tmp_path / "log").read_text().count("filling=") == len(events)


def _wait_for_line(path: Path, text: str, found: threading.Event) -> None:
    while text not in path.read_text():
        os.sched_yield()
    found.set()


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        log = opened(tmp_path, PatientOutput(nowhere.fileno()))
        entered, go_on = threading.Event(), threading.Event()
        write_line = log._write_line

        def held(line: str) -> None:
            entered.set()
            assert go_on.wait(20.0)
            write_line(line)

        monkeypatch.setattr(log, "_write_line", held)
        log.info("first")
        assert entered.wait(20.0)
        for index in range(MAX_QUEUED_LINES + 7):
            log.info(f"event-{index}")
        go_on.set()
        log._queue.put(None)
        log._thread.join(20.0)
    assert "lines-dropped count=7" in (tmp_path / "log").read_text()


def test_a_reader_that_is_gone_is_no_error(tmp_path: Path, pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    log = opened(tmp_path, PatientOutput(pipe[1]))
    log.info("one")
    log.info("two")
    log.close()
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_files_rotate_and_never_truncate(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "log", 100, 3)
    for index in range(12):
        file.write(f"{index:029d}\n".encode())
    file.close()
    kept = [(tmp_path / name).read_text().split() for name in ("log.2", "log.1", "log")]
    assert [int(line) for lines in kept for line in lines] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    again = RotatedFile(tmp_path / "log", 1000, 3)
    again.write(b"12\n")
    again.close()
    assert (tmp_path / "log").read_text().split()[-1] == "12"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_what_libraries_say_comes_out_here(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = opened(tmp_path, PatientOutput(pipe[1]))
    restore = adopt_foreign_lines(log)
    try:
        logging.getLogger("some.library").warning("odd %s", "thing")
        logging.getLogger("some.library").info("chatter")
    finally:
        restore()
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.endswith('WARNING worker-1 some.library message="odd thing"')
