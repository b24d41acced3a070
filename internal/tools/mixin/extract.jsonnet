// The alerts and the dashboard of kubernetes-mixin that watch kube-proxy, as the facts that
// internal/e2e/mixin_test.go evaluates: expressions, and how long they must hold.
local mixin = import 'mixin.libsonnet';
local dashboard = mixin.grafanaDashboards['proxy.json'];
local group = 'kubernetes-system-kube-proxy';

{
  source: 'https://github.com/kubernetes-monitoring/kubernetes-mixin at commit ' + std.extVar('commit') +
          ', rendered by internal/tools/mixin/render.sh',
  groups: [
    { name: g.name, rules: [{ alert: r.alert, expr: std.stripChars(r.expr, '\n'), 'for': r['for'] } for r in g.rules] }
    for g in mixin.prometheusAlerts.groups
    if g.name == group
  ],
  variables: [
    if std.isObject(v.query) then v.query.query else v.query
    for v in dashboard.templating.list
    if v.type == 'query'
  ],
  queries: [t.expr for p in dashboard.panels if std.objectHas(p, 'targets') for t in p.targets],
}
