package programmed_test

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/serviceplane/serviceplane/node/programmed"
)

// Which nodes count. A node that is not ready counts, unless the Policy says otherwise.
func TestPolicy(t *testing.T) {
	ready := func(status v1.ConditionStatus, since time.Duration) v1.NodeStatus {
		return v1.NodeStatus{Conditions: []v1.NodeCondition{
			{Type: v1.NodeMemoryPressure}, {Type: v1.NodeReady, Status: status, LastTransitionTime: metav1.NewTime(began.Add(-since))},
		}}
	}
	fiveMinutes := programmed.NodePolicy{NotReadyFor: 5 * time.Minute}
	linux := programmed.NodePolicy{Selector: labels.SelectorFromSet(labels.Set{"kubernetes.io/os": "linux"})}
	for name, test := range map[string]struct {
		policy programmed.NodePolicy
		node   v1.Node
		want   bool
	}{
		"ready":                       {node: v1.Node{Status: ready(v1.ConditionTrue, time.Hour)}, want: true},
		"not ready":                   {node: v1.Node{Status: ready(v1.ConditionUnknown, time.Hour)}, want: true},
		"without conditions":          {node: v1.Node{}, want: true},
		"shut down":                   {node: v1.Node{Spec: v1.NodeSpec{Taints: []v1.Taint{{Key: "a"}, {Key: v1.TaintNodeOutOfService}}}}},
		"long ready":                  {policy: fiveMinutes, node: v1.Node{Status: ready(v1.ConditionTrue, time.Hour)}, want: true},
		"not ready for a minute":      {policy: fiveMinutes, node: v1.Node{Status: ready(v1.ConditionFalse, time.Minute)}, want: true},
		"not ready for long":          {policy: fiveMinutes, node: v1.Node{Status: ready(v1.ConditionUnknown, 5*time.Minute)}},
		"new, without conditions":     {policy: fiveMinutes, node: v1.Node{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(began)}}, want: true},
		"without conditions for long": {policy: fiveMinutes, node: v1.Node{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(began.Add(-time.Hour))}}},
		"selected":                    {policy: linux, node: v1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"kubernetes.io/os": "linux"}}}, want: true},
		"not selected":                {policy: linux, node: v1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"kubernetes.io/os": "windows"}}}},
	} {
		if got := test.policy.Counts(&test.node, began); got != test.want {
			t.Errorf("%s: Counts = %t, want %t", name, got, test.want)
		}
	}
}
