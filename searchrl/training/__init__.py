# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A batch in, updated parameters out: learner, train step, optimizer."""
