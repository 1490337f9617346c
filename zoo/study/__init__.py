"""Studies: whether an attention helps, on what data, at what budget; tuned alike, repeated, with intervals."""

from zoo.study.description import Arm, Protocol, Study, read_study
from zoo.study.plan import Measure, Outcome, Plan, Run
from zoo.study.statistics import Difference, compare, interval

__all__ = [
    "Arm",
    "Difference",
    "Measure",
    "Outcome",
    "Plan",
    "Protocol",
    "Run",
    "Study",
    "compare",
    "interval",
    "read_study",
]
