# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A question's way to a finished trajectory: sampler, driver, searches under way."""
