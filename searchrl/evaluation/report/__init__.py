# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report of runs: one self-contained HTML page."""
