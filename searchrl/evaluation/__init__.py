# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A policy judged: cases, scores, tables, figures."""
