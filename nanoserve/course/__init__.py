"""The learner's workbench. A notebook needs one name: `from nanoserve.course import day`."""

from nanoserve.course.day import Day, day

__all__ = ["Day", "day"]
