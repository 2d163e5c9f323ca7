package main

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	gw "sigs.k8s.io/gateway-api/apis/v1"
)

// listener is a listener of a Gateway with the routes that are attached to it.
type listener struct {
	*gw.Listener
	gateway *gateway
	// kinds are the kinds of routes that may attach.
	kinds []gw.RouteGroupKind
	// accepted, conflicted and resolved are conditions.
	accepted, conflicted, resolved metav1.Condition
	// routes are attached, the oldest first. That one gets the connections.
	routes []*route
}

// newListener judges a listener.
func newListener(g *gateway, spec *gw.Listener) *listener {
	l := &listener{
		Listener: spec, gateway: g, kinds: []gw.RouteGroupKind{},
		accepted:   condition(gw.ListenerConditionAccepted, true, gw.ListenerReasonAccepted, ""),
		conflicted: condition(gw.ListenerConditionConflicted, false, gw.ListenerReasonNoConflicts, ""),
		resolved:   condition(gw.ListenerConditionResolvedRefs, true, gw.ListenerReasonResolvedRefs, ""),
	}
	kind := kindOf(spec.Protocol)
	if kind == "" {
		l.accepted = condition(gw.ListenerConditionAccepted, false, gw.ListenerReasonUnsupportedProtocol, fmt.Sprintf("protocol %s is neither TCP nor UDP", spec.Protocol))
	}
	if other := l.rival(); other != nil {
		message := fmt.Sprintf("listener %s has port %d too", other.Name, other.Port)
		l.conflicted = condition(gw.ListenerConditionConflicted, true, gw.ListenerReasonProtocolConflict, message)
		l.accepted = condition(gw.ListenerConditionAccepted, false, gw.ListenerReasonProtocolConflict, message)
	}
	for _, k := range l.wantedKinds(kind) {
		if k.Kind == kind && deref(k.Group, gw.GroupName) == gw.GroupName {
			l.kinds = append(l.kinds, k)
			continue
		}
		l.resolved = condition(gw.ListenerConditionResolvedRefs, false, gw.ListenerReasonInvalidRouteKinds, fmt.Sprintf("a listener of protocol %s has no %ss", spec.Protocol, k.Kind))
	}
	return l
}

// wantedKinds are those of allowedRoutes, or the kind of the protocol.
func (l *listener) wantedKinds(kind gw.Kind) []gw.RouteGroupKind {
	switch {
	case l.AllowedRoutes != nil && len(l.AllowedRoutes.Kinds) > 0:
		return l.AllowedRoutes.Kinds
	case kind == "":
		return nil
	default:
		group := gw.Group(gw.GroupName)
		return []gw.RouteGroupKind{{Group: &group, Kind: kind}}
	}
}

// rival returns another listener to which the same packets belong, or nil. None of them gets
// the packets. Listeners of HTTP, HTTPS and TLS share ports with each other, but not with TCP.
func (l *listener) rival() *gw.Listener {
	for i := range l.gateway.Spec.Listeners {
		other := &l.gateway.Spec.Listeners[i]
		if other.Name != l.Name && other.Port == l.Port && (other.Protocol == l.Protocol && kindOf(l.Protocol) != "" ||
			other.Protocol == gw.TCPProtocolType && l.Protocol != gw.UDPProtocolType ||
			l.Protocol == gw.TCPProtocolType && other.Protocol != gw.UDPProtocolType) {
			return other
		}
	}
	return nil
}

func (l *listener) isAccepted() bool { return l.accepted.Status == metav1.ConditionTrue }

// backends are those of the oldest route.
func (l *listener) backends() []backend {
	if len(l.routes) == 0 {
		return nil
	}
	return l.routes[0].resolved
}

// matches reports whether a route asks for the listener.
func (l *listener) matches(ref *gw.ParentReference) bool {
	return deref(ref.SectionName, l.Name) == l.Name && deref(ref.Port, l.Port) == l.Port
}

// allows reports whether the Gateway lets a route attach to the listener.
func (l *listener) allows(r *route, namespaces []*v1.Namespace) bool {
	return slices.ContainsFunc(l.kinds, func(k gw.RouteGroupKind) bool { return k.Kind == r.kind }) &&
		l.allowsNamespace(r.meta.Namespace, namespaces)
}

func (l *listener) allowsNamespace(name string, namespaces []*v1.Namespace) bool {
	allowed := gw.RouteNamespaces{}
	if l.AllowedRoutes != nil {
		allowed = deref(l.AllowedRoutes.Namespaces, allowed)
	}
	switch deref(allowed.From, gw.NamespacesFromSame) {
	case gw.NamespacesFromSame:
		return name == l.gateway.Namespace
	case gw.NamespacesFromAll:
		return true
	case gw.NamespacesFromSelector:
		selector, err := metav1.LabelSelectorAsSelector(allowed.Selector)
		return err == nil && slices.ContainsFunc(namespaces, func(n *v1.Namespace) bool {
			return n.Name == name && selector.Matches(labels.Set(n.Labels))
		})
	default:
		return false
	}
}

// kindOf returns the kind of the routes of a protocol, or nothing if it is not supported.
func kindOf(protocol gw.ProtocolType) gw.Kind {
	switch protocol {
	case gw.TCPProtocolType:
		return kindTCPRoute
	case gw.UDPProtocolType:
		return kindUDPRoute
	default:
		return ""
	}
}

func protocolOf(kind gw.Kind) v1.Protocol {
	if kind == kindTCPRoute {
		return v1.ProtocolTCP
	}
	return v1.ProtocolUDP
}
