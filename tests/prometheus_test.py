# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""prometheus: what the search server counts, in formats that are read."""

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
import servers
from servers import ask

from searchrl.serving import prometheus


def test_all_that_is_counted_is_read_by_prometheus():
  with servers.serving() as server:
    for texts in (['river', 'river', 'Lot'], ['Aude']):
      ask(server, queries=texts)
    ask(server, queries=3)
    servers.until(lambda: 'request_seconds_count 3' in ask(
        server, '/metrics', 'GET')[2])
    status, headers, text = ask(server, '/metrics', 'GET')
  assert status == 200
  assert headers['Content-Type'].startswith('text/plain; version=0.0.4')
  found = {}
  for family in parser.text_string_to_metric_families(text):
    for sample in family.samples:
      found[sample.name.removeprefix('searchrl_search_'),
            *sample.labels.values()] = sample.value
  assert found['requests_total', '200'] == 2
  assert found['requests_total', '400'] == 1
  assert found['queries_total',] == 4 and found['engine_queries_total',] == 3
  assert found['engine_batch_queries_bucket', '1.0'] == 1
  assert found['engine_batch_queries_bucket', '4.0'] == 2
  assert found['engine_batch_queries_sum',] == 4
  assert found['request_seconds_count',] == 3
  assert found['request_seconds_bucket', '+Inf'] == 3


def test_openmetrics_is_given_to_who_asks_for_it():
  accept = {'Accept': 'application/openmetrics-text; version=1.0.0'}
  with servers.serving() as server:
    ask(server, queries=['river'])
    _, headers, text = ask(server, '/metrics', 'GET', accept.items())
  assert headers['Content-Type'].startswith('application/openmetrics-text')
  names = {family.name for family in
           openmetrics.text_string_to_metric_families(text)}
  assert {'searchrl_search_requests', 'searchrl_search_engine_seconds'} <= names


def test_the_names_stay_those_of_dashboards():
  metrics = prometheus.Metrics(lambda: 7)
  metrics.requests.labels('429').inc()
  with metrics.active.track_inprogress(), metrics.request_secs.time():
    assert metrics.registry.get_sample_value(
        'searchrl_search_active_requests') == 1
  metrics.add_call(queries=5, distinct=3, secs=0.02)
  metrics.refused_connections.inc()
  metrics.failures.inc()
  metrics.cut_queries.inc(2)
  value = lambda name, **labels: metrics.registry.get_sample_value(
      f'searchrl_search_{name}', labels)
  assert value('requests_total', status='429') == 1
  assert value('active_requests') == 0 and value('waiting_queries') == 7
  assert value('queries_total') == 5 and value('engine_queries_total') == 3
  assert value('cut_queries_total') == 2
  assert value('refused_connections_total') == 1 == value('failures_total')
  assert value('request_seconds_count') == 1
  assert value('engine_seconds_bucket', le='0.01') == 0
  assert value('engine_seconds_bucket', le='0.025') == 1
  assert value('engine_batch_queries_sum') == 5


def test_a_post_to_no_page_is_counted():
  with servers.serving() as server:
    assert ask(server, '/rerank', queries=['a'])[0] == 404
    text = ask(server, '/metrics', 'GET')[2]
  assert 'requests_total{status="404"} 1' in text
