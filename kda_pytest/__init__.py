"""The plug-in for pytest, under the name that it had."""

from ptxkit.pytest_plugin import *  # noqa: F403
