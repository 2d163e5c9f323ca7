package main

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/pkg/features"

	"github.com/serviceplane/serviceplane/changetracker"
)

// condition returns a condition without its generation and time, which merge adds.
func condition[T, R ~string](t T, holds bool, reason R, message string) metav1.Condition {
	status := metav1.ConditionFalse
	if holds {
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: string(t), Status: status, Reason: string(reason), Message: message}
}

// merge returns old conditions with newer ones. Conditions of other types stay, and so does
// the time of those that have not changed.
func merge(old []metav1.Condition, generation int64, newer ...metav1.Condition) []metav1.Condition {
	merged := slices.Clone(old)
	for _, c := range newer {
		c.ObservedGeneration = generation
		meta.SetStatusCondition(&merged, c)
	}
	return merged
}

// conditions returns those that the route has for a parent.
func (r *route) conditions(controller gw.GatewayController, ref *gw.ParentReference) []metav1.Condition {
	for _, s := range r.status.Parents {
		if s.ControllerName == controller && reflect.DeepEqual(s.ParentRef, *ref) {
			return s.Conditions
		}
	}
	return nil
}

// olderRoute says which route gets the connections instead of an attached one.
func olderRoute(l *listener, r *route) string {
	if l.routes[0] == r {
		return ""
	}
	return fmt.Sprintf("the older route %s gets the connections of listener %s", nameOf(l.routes[0].meta), l.Name)
}

// classStatus returns the status of a GatewayClass.
func classStatus(c *gw.GatewayClass) gw.GatewayClassStatus {
	status := *c.Status.DeepCopy()
	accepted := condition(gw.GatewayClassConditionStatusAccepted, true, gw.GatewayClassReasonAccepted, "")
	if c.Spec.ParametersRef != nil {
		accepted = condition(gw.GatewayClassConditionStatusAccepted, false, gw.GatewayClassReasonInvalidParameters, "this controller has no parameters: remove parametersRef")
	}
	status.Conditions = merge(status.Conditions, c.Generation, accepted)
	status.SupportedFeatures = nil
	for _, f := range []features.FeatureName{
		features.SupportGateway, features.SupportGatewayAddressEmpty, features.SupportGatewayStaticAddresses,
		features.SupportReferenceGrant, features.SupportTCPRoute, features.SupportUDPRoute,
	} {
		status.SupportedFeatures = append(status.SupportedFeatures, gw.SupportedFeature{Name: gw.FeatureName(f)})
	}
	slices.SortFunc(status.SupportedFeatures, func(a, b gw.SupportedFeature) int { return cmp.Compare(a.Name, b.Name) })
	return status
}

// failures are the service ports that the engine could not program, with their errors.
type failures map[changetracker.ServicePortName]error

func (f failures) add(err error, ports []changetracker.ServicePort) {
	for i := range ports {
		f[ports[i].Name] = err
	}
}

// gatewayStatus returns the status of a Gateway after a sync.
func (p *plan) gatewayStatus(g *gateway, failed failures) gw.GatewayStatus {
	status := *g.Status.DeepCopy()
	accepted := condition(gw.GatewayConditionAccepted, true, gw.GatewayReasonAccepted, "")
	programmed := condition(gw.GatewayConditionProgrammed, true, gw.GatewayReasonProgrammed, "")
	old := status.Listeners
	status.Listeners = nil
	for _, l := range g.listeners {
		s := l.status(failed[l.servicePort()])
		if i := slices.IndexFunc(old, func(o gw.ListenerStatus) bool { return o.Name == l.Name }); i >= 0 {
			s.Conditions = merge(old[i].Conditions, g.Generation, s.Conditions...)
		} else {
			s.Conditions = merge(nil, g.Generation, s.Conditions...)
		}
		status.Listeners = append(status.Listeners, s)
		if !l.isAccepted() {
			accepted = condition(gw.GatewayConditionAccepted, true, gw.GatewayReasonListenersNotValid, l.accepted.Message)
		}
		if err := failed[l.servicePort()]; err != nil {
			programmed = condition(gw.GatewayConditionProgrammed, false, gw.GatewayReasonPending, err.Error())
		}
	}
	if g.unaddressed != nil {
		programmed = condition(gw.GatewayConditionProgrammed, false, g.unaddressed.reason, g.unaddressed.message)
	}
	if g.rejected != nil {
		accepted = condition(gw.GatewayConditionAccepted, false, g.rejected.reason, g.rejected.message)
		programmed = condition(gw.GatewayConditionProgrammed, false, gw.GatewayReasonInvalid, g.rejected.message)
	}
	status.Conditions = merge(status.Conditions, g.Generation, accepted, programmed)
	status.Addresses = nil
	for _, a := range g.addrs {
		t := gw.IPAddressType
		status.Addresses = append(status.Addresses, gw.GatewayStatusAddress{Type: &t, Value: a.String()})
	}
	return status
}

// status returns the status of a listener, with conditions that are not merged yet.
func (l *listener) status(failed error) gw.ListenerStatus {
	programmed := condition(gw.ListenerConditionProgrammed, true, gw.ListenerReasonProgrammed, "")
	switch {
	case !l.isAccepted() || l.gateway.rejected != nil || len(l.gateway.addrs) == 0:
		programmed = condition(gw.ListenerConditionProgrammed, false, gw.ListenerReasonInvalid, "the listener or the Gateway is not accepted, or has no address")
	case failed != nil:
		programmed = condition(gw.ListenerConditionProgrammed, false, gw.ListenerReasonPending, failed.Error())
	}
	return gw.ListenerStatus{
		Name: l.Name, SupportedKinds: l.kinds, AttachedRoutes: int32(len(l.routes)), //nolint:gosec // there are not so many routes
		Conditions: []metav1.Condition{l.accepted, l.conflicted, l.resolved, programmed},
	}
}
