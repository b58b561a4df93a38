"""After a switch a part of another layout, and one that nobody asked, are named."""

import pytest

from services.core.ids import Epoch, LayoutKind
from services.worker.steps.layout_evidence import HalfSwitchedError, check_parts

PP, TP = LayoutKind.PP, LayoutKind.TP
PARTS = ("stage", "peers", "graphs")


def test_parts_of_the_active_layout_pass() -> None:
    check_parts(PARTS, {"stage": {PP}, "peers": {PP, TP}, "graphs": {PP}}, PP, Epoch(2))


def test_parts_that_stay_behind_are_named() -> None:
    """R, F10"""
    with pytest.raises(HalfSwitchedError) as error:
        check_parts(PARTS, {"stage": {PP}, "peers": {TP}, "graphs": set()}, PP, Epoch(2))
    assert str(error.value) == "switched to pp in epoch 2, but peers is of tp, graphs is of no layout"


def test_a_part_that_nobody_asked_is_named() -> None:
    with pytest.raises(HalfSwitchedError, match=r"but graphs was not asked$"):
        check_parts(PARTS, {"stage": {PP}, "peers": {PP}}, PP, Epoch(2))
