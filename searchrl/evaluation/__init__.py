# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a policy: cases, scores, tables and figures."""
