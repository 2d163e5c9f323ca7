package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/node/programmed/cluster"
)

// A preStop hook waits until no node sends to its pod any more, and says why it has given up.
func ExampleClient_WaitUntilLeft() {
	config := &rest.Config{Host: "http://127.0.0.1:1"} // in a pod: rest.InClusterConfig
	client, err := cluster.New(config)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithTimeout(context.Background(), 50*time.Millisecond) // less than the grace period of the pod
	defer stop()
	pod := cluster.Pod{Namespace: "shop", Name: "web-5d9c", IPs: []string{"10.244.1.7"}}
	err = client.WaitUntilLeft(ctx, pod, client.Dial(cluster.NodeOptions{}))
	var still *cluster.NotLeftError // its Reason is that of the pod, or of the API server
	fmt.Println(errors.As(err, &still) && errors.Is(err, context.DeadlineExceeded))
	// Output: true
}
