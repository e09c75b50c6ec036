# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is learned and judged: questions, data sets, pairs for an encoder."""
