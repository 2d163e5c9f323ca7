package nodeproxy

import (
	"context"
	"errors"
	"runtime"
	"strconv"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	events "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/serviceplane/serviceplane/proxier"
)

// version returns the module's version, the revision and the version of Go.
func version() string {
	built := buildVersion()
	if revision := buildSetting("vcs.revision"); revision != "" {
		built += " " + revision
	}
	return built + " " + runtime.Version()
}

// untilSynced waits for the first sync. It returns false if ctx ends first.
func untilSynced(ctx context.Context, p *proxier.Proxier) bool {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !p.Status().Synced {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// eventRetry is the pause between attempts to write the event.
const eventRetry = 15 * time.Second

// writeEvent writes the event Starting on the Node, as kube-proxy does. It retries until
// the API server answers, and only logs a refusal.
func writeEvent(ctx context.Context, client dynamic.Interface, node string, log *zap.Logger) {
	event, err := startingEvent(node)
	if err != nil {
		log.Warn("event Starting is not written", zap.Error(err))
		return
	}
	resource := client.Resource(events.SchemeGroupVersion.WithResource("events")).Namespace(event.GetNamespace())
	for {
		_, err := resource.Create(ctx, event, metav1.CreateOptions{})
		if err == nil || ctx.Err() != nil {
			return
		}
		if errors.As(err, new(apierrors.APIStatus)) {
			log.Warn("event Starting is not written", zap.Error(err))
			return
		}
		select {
		case <-time.After(eventRetry):
		case <-ctx.Done():
			return
		}
	}
}

func startingEvent(node string) (*unstructured.Unstructured, error) {
	now := time.Now()
	event, err := apiruntime.DefaultUnstructuredConverter.ToUnstructured(&events.Event{
		TypeMeta:   metav1.TypeMeta{APIVersion: events.SchemeGroupVersion.String(), Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{Name: node + "." + strconv.FormatInt(now.UnixNano(), 16), Namespace: metav1.NamespaceDefault},
		EventTime:  metav1.NewMicroTime(now), Type: v1.EventTypeNormal, Reason: "Starting", Action: "StartNodeproxy", Note: "nodeproxy " + version(),
		ReportingController: "nodeproxy", ReportingInstance: "nodeproxy-" + node,
		// As with kube-proxy: kubectl describe node selects events with the name as UID.
		Regarding: v1.ObjectReference{Kind: "Node", Name: node, UID: types.UID(node)},
	})
	return &unstructured.Unstructured{Object: event}, err
}
